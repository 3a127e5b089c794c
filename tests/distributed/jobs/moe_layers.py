"""Layers that call their experts in awkward ways: what a mixture written by a stranger may do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
Make = Callable[[], nn.Module]


class Narrow(nn.Module):
    """An expert that answers in another width, changes its input in place, and may be called by keyword."""

    def __init__(self, out: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, out)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += 1.0
        return self.lin(torch.tanh(hidden))


class Awkward(nn.Module):
    """Scales its own input in place with noise, keeps statistics in a buffer, an attribute and a list, calls experts by
    keyword, in falling order, one of them twice, all of them also for no token, scales what they answer in place, and
    returns several things of which each carries a gradient."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Narrow() for _ in range(experts))
        self.out = nn.Linear(4, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.balance: list[Tensor] = []
        self.seen = 0

    def forward(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        self.calls += 1
        self.seen += len(x)
        x *= 1 + 0.1 * torch.rand(x.shape, dtype=x.dtype)
        scores = self.gate(x).softmax(-1)
        self.balance.append(scores.mean(0).square().sum())
        best = scores.argmax(-1)
        mixed = x.new_zeros(len(x), 4)
        for number in reversed(range(len(self.experts))):
            at = (best == number).nonzero().squeeze(1)
            for part in (at[::2], at[1::2]) if number == 1 else (at,):
                answer = self.experts[number](hidden=x[part])
                answer *= scores[part, number, None]
                mixed = mixed.index_add(0, part, answer)
        return {"y": self.out(mixed)}, scores.sum() * 0.1


class Pairs(nn.Module):
    """Experts in two lists, one for each of their layers: the second is asked what the first answers."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.first = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(experts))
        self.second = nn.ModuleList(nn.Linear(5, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, choices = self.gate(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for number in choices.unique().tolist():
            token, slot = torch.where(choices == number)
            answer = self.second[number](F.relu(self.first[number](x[token])))
            mixed = mixed.index_add(0, token, (answer * weights[token, slot, None]).to(mixed.dtype))
        return mixed


class Drawing(nn.Module):
    """Experts draw random numbers, and so does their owner, unless `rate` is 0."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.rate = 0.5
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.rate) if self.rate else x
        scores = self.gate(x).softmax(-1)
        return sum(expert(x) * scores[:, n, None] for n, expert in enumerate(self.experts))  # type: ignore[return-value]


class Stack(nn.Module):
    """Stacked experts in a loop over all of them, with the number of experts equal to the width of a token."""

    def __init__(self, experts: int = WIDTH) -> None:
        super().__init__()
        self.hidden_size = WIDTH
        self.how_many = experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 3) / 2)
        self.bias = nn.Parameter(torch.randn(experts, 3))
        self.down = nn.Parameter(torch.randn(experts, 3, WIDTH) / 2)

    def forward(self, weights: Tensor, which: Tensor, tokens: Tensor) -> Tensor:
        tokens = tokens.view(-1, self.hidden_size)
        mixed = torch.zeros_like(tokens)
        for number in range(self.how_many):
            token, slot = torch.where(which == number)
            answer = torch.tanh(tokens[token] @ self.up[number] + self.bias[number]) @ self.down[number]
            mixed = mixed.index_add(0, token, (answer * weights[token, slot, None]).to(mixed.dtype))
        return mixed


class Stacked(nn.Module):
    """Routes to a Stack; tokens below a threshold go nowhere (the number of experts stands for that). Weights may be of
    another type than tokens."""

    def __init__(self, experts: int = WIDTH, *, weights: torch.dtype | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = Stack(experts)
        self.count = experts

    def forward(self, x: Tensor) -> Tensor:
        weights, choices = self.gate(x).softmax(-1).topk(2)
        choices = torch.where(weights < 0.2, torch.full_like(choices, self.count), choices)
        return self.experts(weights.to(self.weights or x.dtype), which=choices, tokens=x)
