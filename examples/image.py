"""A job with batch norm, on tensors in memory.

shoal train examples/image.py --strategy "dp(2, zero=1)"
"""

from functools import partial

import torch
from torch import Tensor, nn

from shoal.job import ImageData, Job, Target, classifier_metrics, cross_entropy
from shoal.job.data.mnist import mnist


class SmallConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


# With tensors of your own: TensorData(x=images, y=labels). With a torch dataset: DatasetData(dataset).
job = Job(
    name="image",
    model=SmallConvNet,
    train=ImageData(*mnist("train")),
    validation=ImageData(*mnist("validation")),
    loss=cross_entropy,
    metrics=classifier_metrics,
    optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    global_batch=48,
    steps=200,
    evaluate_every=50,
    target=Target(metric="accuracy", value=0.95, better="higher"),
    batch_norm="sync",
)
