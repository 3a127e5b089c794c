"""Small GPTs whose attention takes its sizes from its input: `B, T, C = x.size()` ... `view(B, T, C)`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from layout import sized_models as sized
from shoal.job import Job, TensorData, cross_entropy

WORDS, TOKENS, SAMPLES = 31, 6, 48


class Block(nn.Module):
    def __init__(self, code: sized.Code) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(sized.WIDTH), sized.Attention(code)
        self.ln_2 = nn.LayerNorm(sized.WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(sized.WIDTH, 4 * sized.WIDTH), nn.GELU(), nn.Linear(4 * sized.WIDTH, sized.WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, code: sized.Code) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, sized.WIDTH), nn.Embedding(sized.LONGEST, sized.WIDTH)
        self.h = nn.ModuleList([Block(code) for _ in range(4)])
        self.ln_f, self.lm_head = nn.LayerNorm(sized.WIDTH), nn.Linear(sized.WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def job(code: sized.Code) -> Job:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (SAMPLES, TOKENS + 1), generator=generator)
    return Job(
        name="views",
        model=partial(GPT, code),
        train=TensorData(x=words[:, :-1], y=words[:, 1:].contiguous()),
        loss=cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        clip=1.0,
        global_batch=12,
        steps=4,
    )


masked = partial(job, sized.masked)
flash = partial(job, sized.flash)
beside_samples = partial(job, sized.heads_beside_samples)
at_once = partial(job, sized.three_at_once)
