"""A deep model of PyTorch's own layers, its head tied to its embedding, for a pipeline: stages are found, not declared.

shoal train examples/pipeline.py --strategy "pp(2, '1f1b', micro=4)"
shoal verify examples/pipeline.py --strategy "pp(2, 'zero-bubble', micro=4) * dp(2, zero=1)"
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.job import Job, TextData, cross_entropy, language_metrics

SEQUENCE, HIDDEN, LAYERS = 64, 64, 6


class DeepModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        layer = partial(nn.TransformerEncoderLayer, HIDDEN, 4, 4 * HIDDEN, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(SEQUENCE))
        future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=future)
        return self.head(self.norm(x)) / HIDDEN**0.5


text = Path(torch.__file__).with_name("nn").joinpath("modules", "module.py").read_bytes()
data = partial(TextData, sequence=SEQUENCE)
job = Job(
    name="pipeline",
    model=DeepModel,
    train=data(text[:80_000]),
    validation=data(text[80_000:]),
    loss=cross_entropy,
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    clip=1.0,
    global_batch=24,
    steps=200,
    metrics=language_metrics,
)
