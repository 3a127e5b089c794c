"""A plan finds the heads of attention that are written down in no attribute, as `explain` does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TextData, cross_entropy
from shoal.layout.job_shape import shape_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_heads_are_found_where_attention_is_cut() -> None:
    job = Job(
        name="heads",
        model=Net,
        train=TextData(b"some words to read " * 50, sequence=16),
        loss=cross_entropy,
        optimizer=lambda groups: torch.optim.AdamW(groups),
        global_batch=4,
        steps=1,
    )
    shape, facts = shape_of(job)
    assert (shape.heads, shape.layers, shape.hidden, facts.heads) == (4, 3, 32, 4)
