"""What is known of a sequence that may be cut, and why one may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

Leaves = dict[int, int]
"""Argument of a block, laid flat -> the dimension that is the sequence."""

Places = tuple[int, int]
"""Of a cut tensor: its dimension that holds the positions, and how many elements of that dimension each has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A module that holds attention and runs as if it had the full sequence."""

    arguments: Mapping[int, Places]
    """Its arguments that are cut, laid flat."""
    results: Mapping[int, Places]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPlan:
    """How the sequence is cut."""

    length: int
    dim: int
    """The sequence's dimension of the stream between blocks."""
    blocks: tuple[str, ...]
    stream: int
    """Which argument of a block, laid flat, is the stream."""
    extras: Mapping[str, Leaves]
    """Block -> its other arguments that are cut."""
    masks: Mapping[str, tuple[int, ...]]
    """Block -> its arguments that are masks of positions by positions."""
    causal: bool
    batch: Mapping[str, int] | None
    """Entries of the batch that the loss reads position by position -> their dimension; None: the loss needs the whole
    sequence, which is gathered behind the last block."""
    why_whole: str = ""
    holders: Mapping[str, Holder] = field(default_factory=dict)
    """Modules that write attention out themselves."""
    whole_from: str = ""
    """Of a model that runs so as a whole: the first module that is called with the gathered sequence, if any is."""

    @property
    def in_root(self) -> bool:
        """Whether the model as a whole runs as if it had the full sequence. The only block is then the module at which
        the sequence is cut."""
        return "" in self.holders


class CannotCutSequence(ValueError):
    """Some operation needs the whole sequence."""


class ByStructure(CannotCutSequence):
    """The blocks are not what the sequence runs through: the model's own forward may still be followed."""


class NothingAttends(CannotCutSequence):
    """No operation compares positions of the sequence with each other."""


class Made(CannotCutSequence):
    """An operation meets what the model's code made for the positions that it sees."""

    def __init__(self, reason: str, op: int) -> None:
        super().__init__(reason)
        self.op = op


def named(model: nn.Module, path: str) -> str:
    """A module as a message names it; the root has no path."""
    return path or f"the model itself (class {type(model).__name__})"
