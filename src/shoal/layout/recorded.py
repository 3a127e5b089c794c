"""What a traced forward consists of: values, the operations that make them, and the calls of modules around both.

Plain records, in the order in which things happened; `trace.py` fills them, everything that infers reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.layout.tensor.sized_calls import NotedCall


@dataclass(frozen=True, slots=True)
class Ref:
    """A value in the arguments of an operation."""

    value: int


@dataclass(slots=True)
class Value:
    """A tensor at one moment: an operation that writes in place makes a new one."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    """Where it comes from: "parameter", "buffer", "batch" (with its name), "op", or "constant"."""
    name: str
    producer: int
    """The operation that made it; -1 if none did."""
    learned: bool
    """Whether it depends on a parameter."""
    strides: tuple[int, ...] = ()
    """How it lies in memory: code may view it or have to copy it."""
    storage: int = 0
    """Which memory it lies in, shared by views; 0 if that is not known."""
    reached: bool = True
    """Whether the gradient of the loss comes to it."""

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(slots=True)
class Op:
    """One ATen operation."""

    number: int
    name: str
    """Without namespace and overload: "addmm"."""
    overload: Any
    args: tuple[Any, ...]
    """As called, with every tensor replaced by a Ref."""
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str
    """Path of the innermost module it runs in."""


@dataclass(slots=True)
class TracedCall:
    """One call of a module: which operations it spans, and the tensors it was given and gave back."""

    path: str
    first: int
    """Number of the first operation within."""
    arguments: list[int | None]
    """Values of its arguments, laid flat; None for what is no tensor."""
    stop: int = -1
    """Number of the first operation after it."""
    results: list[int | None] = field(default_factory=list)
    inputs: Any = None
    """(args, kwargs) as called, with every tensor replaced by a Ref: enough to call it again."""
    number: int = -1
    """Its own, among all calls."""
    learning: frozenset[int] = frozenset()
    """Which results require a gradient."""
    bare: bool = False
    """Whether it gave back one tensor, and not something that holds tensors."""


@dataclass(slots=True)
class TracedAttention:
    """One call of `scaled_dot_product_attention`, whatever operations it is made of."""

    first: int
    """Number of its first operation."""
    stop: int
    query: int
    key: int
    value: int
    mask: int | None
    causal: bool
    output: int
    module: str


@dataclass(frozen=True, slots=True)
class ValueRead:
    """A place where the model's code reads the value of a tensor, as a branch does."""

    op: int
    """Number of the operation that follows."""
    module: str
    learned: bool
    """Whether the value depends on a parameter."""
    values: tuple[int, ...] = ()
    """What is read."""


@dataclass(slots=True)
class Trace:
    """What one forward does."""

    model: nn.Module
    fake: bool
    samples: int
    values: list[Value]
    ops: list[Op]
    calls: list[TracedCall]
    parameters: dict[str, int]
    """Name -> value."""
    buffers: dict[str, int]
    output: list[int | None]
    """The model's output, laid flat."""
    loss: int | None
    model_stop: int
    """Number of the first operation after the model: the loss."""
    attention: list[TracedAttention] = field(default_factory=list)
    questions: list[ValueRead] = field(default_factory=list)
    sized_calls: list[NotedCall] = field(default_factory=list)
    """Calls of functions that name sizes, in order."""
    constants: dict[int, str] = field(default_factory=dict)
    """Value -> digest of a tensor that is neither parameter, buffer, batch nor computed: a constant of the code."""
    buffers_behind: dict[str, int] = field(default_factory=dict)
    """Name -> the value that a buffer has after the forward."""

    def users(self) -> dict[int, list[int]]:
        """Value -> the operations that read it."""
        found: dict[int, list[int]] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.inputs):
                found.setdefault(value, []).append(op.number)
        return found

    def parameter_names(self) -> dict[int, str]:
        return {value: name for name, value in self.parameters.items()}

    def calls_of(self, path: str) -> list[TracedCall]:
        return [call for call in self.calls if call.path == path]
