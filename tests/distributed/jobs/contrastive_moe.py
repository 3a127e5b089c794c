"""A contrastive loss over the global batch on top of a mixture of experts: tokens travel to experts, embeddings are
gathered, and both cut the same batch."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.jobs.moe import TopTwo
from shoal.job import Job, TensorData

WIDTH, VOCAB, SEQUENCE, SAMPLES = 8, 11, 5, 48


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.mixtures = nn.ModuleList(TopTwo(WIDTH, 4) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens)
        for mixture in self.mixtures:
            x = x + mixture(x)
        return F.normalize(x.mean(1), dim=-1), self.temperature.exp()


def info_nce(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    embedded, scale = output
    logits = embedded @ F.normalize(batch["other"], dim=-1).T * scale
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)


def contrastive() -> Job:
    generator = torch.Generator().manual_seed(3)
    return Job(
        name="contrastive",
        model=Encoder,
        loss=info_nce,
        loss_over="batch",
        train=TensorData(
            x=torch.randint(VOCAB, (SAMPLES, SEQUENCE), generator=generator),
            other=torch.randn(SAMPLES, WIDTH, generator=generator),
        ),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        global_batch=12,
        steps=6,
        clip=1.0,
        buffers={"*.chosen": "sum"},
    )
