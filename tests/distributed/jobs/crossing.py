"""Models whose tensors cross stage boundaries in unusual ways: given twice, written in place, hooked, detached.

Every entry of JOBS is a job by its name. Models are of a few hundred parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.job import Job, TensorData

WIDTH, CLASSES, SAMPLES = 6, 5, 60


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Three(nn.Module):
    """Takes three tensors, as attention takes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, key: Tensor, *, value: Tensor) -> Tensor:
        return value + torch.sigmoid(self.query(query)) * torch.tanh(self.key(key))


class OneTensorThreeTimes(Stack):
    block = Three

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, x, value=x)
        return self.head(x)


class SharedBlock(Stack):
    """The result of the first of two calls of a block is used late."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[0](first * 1.1)
        return self.head(self.blocks[3](self.blocks[2](self.blocks[1](second))) + first)


class Passing(nn.Module):
    """Gives one tensor twice, or an argument back as it is."""

    twice = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x)) + other
        return (y, y) if self.twice else (y, other)


class PassedOn(Stack):
    block = Passing

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].twice = True

    def forward(self, x: Tensor) -> Tensor:
        other = x
        for block in self.blocks:
            x, other = block(x, other)
        return self.head(x + other)


class Lengths(nn.Module):
    """Beside its result: integers, booleans and complex numbers of the samples alone, and a buffer and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        many = x.sum(1).abs().ceil().clamp(max=3).to(torch.int16)
        return self.inner(x), many, x[:, 0] > 0, torch.complex(x, 0.5 * x), self.table, self.inner.down.bias


class Derived(Stack):
    """Code between blocks makes a mask of what the first block gave of the samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Lengths()

    def forward(self, x: Tensor) -> Tensor:
        x, many, chosen, numbers, table, bias = self.first(x)
        mask = many[:, None] + chosen[:, None]
        x = self.blocks[0](x * mask)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x * table + numbers.imag + bias)


class Early(Stack):
    """As Derived, with the mask used behind every cut but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Lengths()

    def forward(self, x: Tensor) -> Tensor:
        x, many, *_ = self.first(x)
        mask = many[:, None] + 1
        for block in self.blocks:
            x = block(x * mask)
        return self.head(x)


class WritesArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation, self.linear = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.activation(x)))


class WrittenInBlock(Stack):
    """The sum sees what the block has written into its argument."""

    block = WritesArgument

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x) + x
        return self.head(x)


class WrittenBehind(Stack):
    """Code behind a block writes into its result; the samples themselves are read again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        y += 1.0
        for block in self.blocks[1:]:
            y = block(y)
            y.mul_(1.1)
        return self.head(y + x)


class Slices(Stack):
    """Results are written into parts of tensors that the code has made of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            filled = torch.zeros_like(x)
            filled[:, 1:] = block(x)[:, 1:]
            x = filled
        return self.head(x)


class Views(Stack):
    """An expanded tensor and a part of another go into a block and are used beside it."""

    def forward(self, x: Tensor) -> Tensor:
        level = self.blocks[0](x).mean(-1, keepdim=True).expand(-1, WIDTH)
        x = self.blocks[1](level) + level
        part = torch.cat([x, x], -1).chunk(2, -1)[0]
        return self.head(self.blocks[3](self.blocks[2](part) + part) + x)


class Hooked(Stack):
    """Hooks change arguments, results and gradients, and record results that are used late."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
            block.register_forward_hook(lambda module, args, output: output * 0.7)
            block.register_forward_hook(partial(self._note, number))

    def _note(self, number: int, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen[number] = output

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return self.head(x + self.seen[0] + self.seen[2])


class Detached(Stack):
    """No gradient comes to the second and third block: with AdamW they must not even decay."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        return self.head(self.blocks[3](x.detach())), first


class Ignoring(nn.Module):
    """Only the last block of a stack reads its second argument."""

    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.inner(x) + before if self.reads else self.inner(x)


class UnusedArgument(Stack):
    block = Ignoring

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].reads = True

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for block in self.blocks:
            x, before = block(x, before), x
        return self.head(x)


class Checkpointed(Stack):
    """The model's own checkpoints, around what is not a block alone."""

    def _two(self, x: Tensor, number: int) -> Tensor:
        return torch.tanh(self.blocks[number + 1](self.blocks[number](x) * 1.2))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 2):
            x = checkpoint(self._two, x * 1.1, number, use_reentrant=False)
        return self.head(x)


class Reentrant(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class Scaling(nn.Module):
    """Autograd keeps a buffer that the next micro-batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.95)
        return self.inner(x) * self.scale


class KeptBuffer(Stack):
    block = Scaling


class Counter(Stack):
    """A counter that the forward advances first and reads last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x) * (1 + 0.1 * self.steps)


class LateCounter(Stack):
    """A counter that the forward reads first and advances last, as another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * (1 + 0.1 * self.steps))
        if self.training:
            self.steps = self.steps + 1
        return x


class Bank(Stack):
    """A memory of what the second block gave, written row by row and read late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        rows = self.rows.clone()
        if self.training:
            with torch.no_grad():
                self.rows[1:] = rows[:-1]
                self.rows[0] = x.detach().mean(0)
        return self.head(self.blocks[3](self.blocks[2](x)) + rows.mean(0))


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class OneNorm(Stack):
    """The first and the last block hold the same batch norm."""

    block = SharedNorm

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].norm = self.blocks[0].norm


class TiedWithin(Stack):
    """Weights that the first and the last block share, and others that the two between share: with two stages on each
    rank, the ranks come to them in opposite orders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight = self.blocks[1].down.weight
        self.blocks[2].up.bias = self.blocks[1].up.bias


def total(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    if isinstance(output, tuple):
        output = output[0] + 0.1 * output[1][:, :CLASSES]
    return F.cross_entropy(output, batch["y"], reduction="sum"), len(output)


def _job(model: Callable[[], nn.Module]) -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return Job(
        name="crossing",
        model=model,
        train=TensorData(x=x, y=y),
        loss=total,
        optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        global_batch=12,
        steps=3,
    )


MODELS = (
    OneTensorThreeTimes,
    SharedBlock,
    PassedOn,
    Derived,
    Early,
    WrittenInBlock,
    WrittenBehind,
    Slices,
    Views,
    Hooked,
    Detached,
    UnusedArgument,
    Checkpointed,
    Reentrant,
    KeptBuffer,
    Counter,
    LateCounter,
    Bank,
    OneNorm,
    TiedWithin,
)
JOBS = {re.sub("(?<!^)(?=[A-Z])", "_", model.__name__).lower(): model for model in MODELS}


def __getattr__(name: str) -> Any:
    """`crossing.py:name` is a job."""
    if name in JOBS:
        return _job(JOBS[name])
    raise AttributeError(name)
