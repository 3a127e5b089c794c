"""Attention and gated feed-forward layers, written for one device: tp finds which projections go together.

shoal train examples/tensor.py --strategy "tp(2, sequence=True)"
shoal verify examples/tensor.py --strategy "dp(2) * tp(2)"
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TextData, cross_entropy, language_metrics

SEQUENCE, HIDDEN, HEAD_WIDTH = 64, 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, 192, bias=False), nn.Linear(HIDDEN, 192, bias=False)
        self.down = nn.Linear(192, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as the projection has room for: on a rank with half of it, half as many.
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(256, HIDDEN), nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.tokens(tokens))))


text = Path(torch.__file__).with_name("nn").joinpath("modules", "module.py").read_bytes()
data = partial(TextData, sequence=SEQUENCE)
job = Job(
    name="tensor",
    model=Model,
    train=data(text[:80_000]),
    validation=data(text[80_000:]),
    loss=cross_entropy,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    clip=1.0,
    global_batch=24,
    steps=200,
    metrics=language_metrics,
)
