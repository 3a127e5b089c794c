"""Models whose way depends on their data, and one whose evaluation packs padded samples: each a job by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy

WIDTH, LENGTH, CLASSES = 8, 6, 3


class Block(nn.Module):
    """Gives back a second tensor for some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        y = x + self.linear(x)
        return (y, None) if x[0, 0, 0] < 100 else (y, y.tanh())


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        more = None
        for block in self.blocks:
            x, more = block(x, more)
        return self.head((x if more is None else x + more).mean(1))


class Padded(nn.Module):
    """The default nn.TransformerEncoder: padding lies at the end, so that evaluation would use nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = (torch.arange(LENGTH) > 3).expand(x.shape[0], LENGTH)
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def _job(model: Callable[[], nn.Module]) -> Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, LENGTH, WIDTH, generator=generator)
    x[2:, 0, 0] = 1000.0
    data = TensorData(x=x, y=torch.randint(0, CLASSES, (16,), generator=generator))
    return Job(
        name="branches",
        model=model,
        train=data,
        validation=data,
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        global_batch=16,
        steps=1,
    )


sometimes = partial(_job, Sometimes)
padded = partial(_job, Padded)
