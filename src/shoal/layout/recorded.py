"""The records of a traced forward: values, the operations that produce them, and the module calls around both.

Plain records in execution order; `trace.py` fills them, all inference reads them.
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
    """A tensor at one moment: an in-place write creates a new value."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    """Its source: "parameter", "buffer", "batch" (with its name), "op", or "constant"."""
    name: str
    producer: int
    """The operation that produced it; -1: none."""
    learned: bool
    """Whether it depends on a parameter."""
    strides: tuple[int, ...] = ()
    """Its strides: they decide whether code can view it or must copy it."""
    storage: int = 0
    """Its storage, shared by views; 0 if unknown."""
    reached: bool = True
    """Whether it receives a gradient from the loss."""

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
    """One call of a module: the operations it spans, the tensors it received and returned."""

    path: str
    first: int
    """Number of its first operation."""
    arguments: list[int | None]
    """Values of its flattened arguments; None for those that are not tensors."""
    stop: int = -1
    """Number of the first operation after it."""
    results: list[int | None] = field(default_factory=list)
    inputs: Any = None
    """(args, kwargs) as called, with every tensor replaced by a Ref: enough to call it again."""
    number: int = -1
    """Its number among all calls."""
    learning: frozenset[int] = frozenset()
    """Which results require a gradient."""
    bare: bool = False
    """Whether it returned one tensor rather than a container of tensors."""


@dataclass(slots=True)
class TracedAttention:
    """One call of `scaled_dot_product_attention`, whichever operations it consists of."""

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
    """The values that are read."""


@dataclass(slots=True)
class Trace:
    """The operations of one forward."""

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
    """The model's flattened output."""
    loss: int | None
    model_stop: int
    """Number of the first operation after the model: the loss."""
    attention: list[TracedAttention] = field(default_factory=list)
    value_reads: list[ValueRead] = field(default_factory=list)
    sized_calls: list[NotedCall] = field(default_factory=list)
    """Calls of functions that name sizes, in order."""
    result: Any = None
    """The model's output as it was returned, with every tensor replaced by a Ref."""
    constants: dict[int, str] = field(default_factory=dict)
    """Value -> digest, for constants of the code: tensors that are neither parameter, buffer, batch nor result."""
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
