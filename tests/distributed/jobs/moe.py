"""Mixtures of experts written by hand and without parallelism in mind, each in another everyday style.

`by_hand` routes each token to two experts with a loop over a ModuleList; `capacity` drops what an expert cannot take;
`soft` asks every expert about every token. A batch of 12 sequences divides among 2, 3 and 4 ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData

WIDTH, VOCAB, SEQUENCE = 8, 11, 5


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class TopTwo(nn.Module):
    """A loop over experts, each asked about the tokens that chose it; counts how often each was chosen."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.register_buffer("chosen", torch.zeros(experts, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, choices = self.router(tokens).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        self.chosen += torch.bincount(choices.flatten(), minlength=len(self.experts))
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(choices == number)
            if len(token) == 0:
                continue
            mixed[token] += weights[token, slot, None] * expert(tokens[token])
        return mixed.reshape(x.shape)


class Adding(TopTwo):
    """A mixture that is a block by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Stack(nn.Module):
    """Its blocks are mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Adding(WIDTH, 4) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Capacity(nn.Module):
    """One expert a token; an expert takes so many tokens and no more. Experts lie in a ModuleDict."""

    def __init__(self, width: int, experts: int, capacity: int = 4) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width, experts) / width)
        self.experts = nn.ModuleDict({f"expert_{n}": Expert(width) for n in range(experts)})
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores = (tokens @ self.gate).softmax(-1)
        best = scores.argmax(-1)
        mixed = tokens.clone()
        for number, expert in enumerate(self.experts.values()):
            taken = (best == number).nonzero().squeeze(1)[: self.capacity]
            answer = expert(tokens[taken])
            answer *= scores[taken, number, None]
            mixed = mixed.index_add(0, taken, answer)
        return mixed.view_as(x)


class Soft(nn.Module):
    """Every expert, every token, weighted."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        answers = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (answers * self.gate(x).softmax(-1).unsqueeze(-2)).sum(-1)


class Block(nn.Module):
    def __init__(self, width: int, mixture: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        return x + self.mixture(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, mixture: type[nn.Module], *, experts: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, mixture(WIDTH, experts)) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def make(name: str, mixture: type[nn.Module], **changes: int) -> Job:
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, VOCAB, (60, SEQUENCE + 1), generator=generator)
    return Job(
        name=name,
        model=partial(Transformer, mixture, **changes),
        train=TensorData(x=x[:, :-1], y=x[:, 1:]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        clip=0.5,
        global_batch=12,
        steps=6,
    )


def by_hand() -> Job:
    return make("by_hand", TopTwo)


def in_block() -> Job:
    return replace(by_hand(), name="in_block", model=Stack, buffers="sum")


def six() -> Job:
    return make("six", TopTwo, experts=6)


def capacity() -> Job:
    return make("capacity", Capacity)


def soft() -> Job:
    return make("soft", Soft)
