"""Jobs whose trained models are exported: tied and frozen parameters, buffers, integers, another library's model."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from shoal.job import Job, TextData, cross_entropy, language_metrics

TEXT = bytes(np.random.default_rng(0).integers(0, 61, 6000, dtype=np.uint8))


class Odd(nn.Module):
    """Tied embedding, a frozen scale, a batch norm, an integer buffer; sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 20)
        self.norm = nn.BatchNorm1d(20)
        self.first = nn.Linear(20, 36)
        self.second = nn.Linear(36, 20)
        self.head = nn.Linear(20, 61, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((20,), 0.7), requires_grad=False)
        self.register_buffer("table", torch.arange(20) % 3)
        self.register_buffer("again", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        h = h + self.second(torch.relu(self.first(h))) * self.scale + self.table
        return self.head(h)


def odd() -> Job:
    return Job(
        name="odd",
        model=Odd,
        train=TextData(TEXT, sequence=12),
        validation=TextData(TEXT[:900], sequence=12),
        loss=cross_entropy,
        metrics=language_metrics,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        global_batch=6,
        steps=5,
        evaluate_every=5,
        seed=3,
    )


def llama() -> Job:
    from transformers import LlamaConfig

    from shoal.job import from_transformers

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return from_transformers(config, sequence=16, global_batch=4, steps=3)
