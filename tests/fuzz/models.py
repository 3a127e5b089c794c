"""Small models drawn from a Case: blocks of every common kind on vectors, tokens and images, and their data.

Only torch is imported. The oracle and the job both build their model here, from the same seed, and nothing else is
shared between them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.cases import CHANNELS, CLASSES, HEADS, LENGTH, SIDE, VOCAB, Case


def data_of(case: Case) -> dict[str, Tensor]:
    """The samples: x, and y of which some targets do not count."""
    generator = torch.Generator().manual_seed(1000 + case.seed)
    n = case.samples
    if case.kind == "tokens":
        x = torch.randint(0, VOCAB, (n, LENGTH), generator=generator)
        y = torch.randint(0, VOCAB, (n, LENGTH), generator=generator)
        if case.ignored:
            y[torch.rand(n, LENGTH, generator=generator) < 0.3] = -100
            y[:, 0] = 1  # every sample counts at least once
        return {"x": x, "y": y}
    shape = (n, case.width) if case.kind == "vectors" else (n, CHANNELS, SIDE, SIDE)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.loss == "mse":
        return {"x": x, "y": torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)}
    return {"x": x, "y": torch.randint(0, CLASSES, (n,), generator=generator)}


class FusedBatchNorm(nn.BatchNorm2d):
    """A norm with its activation inside, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Ema(nn.Module):
    """Follows the mean of what it sees and divides by it: a buffer that each replica would update by its own share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        out = x / (1.0 + self.seen.detach().abs())
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.detach().flatten(0, -2).mean(0), 0.1)
        return out


def norm_of(case: Case, width: int) -> nn.Module:
    match case.norm:
        case "layer":
            return nn.LayerNorm(width)
        case "rms":
            return nn.RMSNorm(width)
        case _:
            return nn.Identity()


class Mlp(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = norm_of(case, case.width)
        self.up = nn.Linear(case.width, 2 * case.width, bias=case.bias)
        self.down = nn.Linear(2 * case.width, case.width, bias=case.bias)
        self.drop = nn.Dropout(case.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Gated(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = norm_of(case, case.width)
        self.gate = nn.Linear(case.width, 2 * case.width, bias=False)
        self.up = nn.Linear(case.width, 2 * case.width, bias=False)
        self.down = nn.Linear(2 * case.width, case.width, bias=False)
        self.dropout = case.dropout

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), self.dropout, self.training)


class Conditional(nn.Module):
    """A layer that is used in every second call only, and one that is never used."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.used = nn.Linear(case.width, case.width)
        self.spare = nn.Linear(case.width, case.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(x))


class PerSample(nn.Module):
    """Each sample chooses between two layers by its own values."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.left = nn.Linear(case.width, case.width)
        self.right = nn.Linear(case.width, case.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.where(x.sum(-1, keepdim=True) > 0, self.left(x), self.right(x))


class Scaled(nn.Module):
    """A constant buffer and a learned scalar."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, case.width))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layer = nn.Linear(case.width, case.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x * self.table) * self.scale


class Attention(nn.Module):
    """Attention in three spellings: the library's function, the library's module, and by hand."""

    def __init__(self, case: Case, spelling: str) -> None:
        super().__init__()
        self.spelling, self.causal, self.dropout = spelling, case.causal, case.dropout
        self.norm = norm_of(case, case.width)
        if spelling == "mha":
            self.inner = nn.MultiheadAttention(case.width, HEADS, dropout=case.dropout, batch_first=True)
        else:
            self.qkv = nn.Linear(case.width, 3 * case.width, bias=case.bias)
            self.out = nn.Linear(case.width, case.width, bias=case.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.spelling == "mha":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
            return x + self.inner(h, h, h, attn_mask=mask, need_weights=False)[0]
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        if self.spelling == "sdpa":
            rate = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=rate)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            if self.causal:
                late = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(late, float("-inf"))
            mixed = scores.softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """Each token goes to one of a list of experts."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.router = nn.Linear(case.width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(case.width, case.width), nn.GELU(), nn.Linear(case.width, case.width))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights = self.router(tokens).softmax(-1)
        best, choice = weights.max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            mine = (choice == index).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(tokens[mine]) * best[mine, None])
        return x + out.view_as(x)


class Convolution(nn.Module):
    def __init__(self, case: Case, spelling: str) -> None:
        super().__init__()
        groups = case.width if spelling == "depthwise" else 1
        self.conv = nn.Conv2d(case.width, case.width, 3, padding=1, groups=groups)
        self.norm: nn.Module = {
            "batch": nn.BatchNorm2d,
            "fused-batch": FusedBatchNorm,
            "layer": lambda w: nn.GroupNorm(1, w),
            "rms": lambda w: nn.GroupNorm(2, w),
        }.get(case.norm, lambda w: nn.Identity())(case.width)
        self.drop = nn.Dropout2d(case.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.conv(x))))


def block_of(case: Case, name: str) -> nn.Module:
    match name:
        case "mlp":
            return Mlp(case)
        case "gated":
            return Gated(case)
        case "conditional":
            return Conditional(case)
        case "per-sample":
            return PerSample(case)
        case "scaled":
            return Scaled(case)
        case "sdpa" | "mha" | "hand":
            return Attention(case, name)
        case "experts":
            return Experts(case)
        case "conv" | "depthwise":
            return Convolution(case, name)
        case "ema":
            return Ema(case.width)
    raise ValueError(name)


class Net(nn.Module):
    """An entry, the blocks and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case_kind, self.centred = case.kind, case.centred
        if case.kind == "tokens":
            self.entry: nn.Module = nn.Embedding(VOCAB, case.width)
            self.places = nn.Parameter(0.1 * torch.randn(LENGTH, case.width))
        elif case.kind == "vectors":
            self.entry = nn.Linear(case.width, case.width)
        else:
            self.entry = nn.Conv2d(CHANNELS, case.width, 3, padding=1)
        self.blocks = nn.ModuleList(block_of(case, name) for name in case.blocks)
        if case.repeated:
            self.blocks.append(self.blocks[0])
        self.norm = norm_of(case, case.width)
        self.head = nn.Linear(case.width, VOCAB if case.kind == "tokens" else CLASSES, bias=not case.tied)
        if case.tied and case.kind == "tokens":
            self.head.weight = self.entry.weight
        if case.frozen:
            for param in self.blocks[0].parameters():
                param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        if self.case_kind == "tokens":
            x = x + self.places
        for block in self.blocks:
            x = block(x)
        if self.case_kind == "images":
            x = x.mean((-2, -1))
        if self.centred:
            x = x - x.mean(0)
        return self.head(self.norm(x))


def build(case: Case) -> nn.Module:
    return Net(case).double()
