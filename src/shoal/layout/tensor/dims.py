"""An operation's arguments by name, and which dimensions of its operands correspond.

Dimensions correspond if splitting one of them splits the others in the same way. The rules of each ATen operation are
in `dim_rules.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.layout.recorded import Op, Ref, Value

Place = tuple[int, int]
"""(value, dimension)."""


@dataclass(slots=True)
class DimLinks:
    """The corresponding dimensions of one operation."""

    carried: list[list[Place]] = field(default_factory=list)
    """Dimensions that pass through. Members of another size hold proportionally more or less."""
    contracted: list[list[Place]] = field(default_factory=list)
    """Dimensions that are summed over: if split, the result is a partial sum."""
    indivisible: dict[Place, int] = field(default_factory=dict)
    """Number of adjacent elements of a dimension that must stay together (the channels of one group)."""


@dataclass(slots=True)
class BoundOp:
    """An operation with its arguments by name."""

    op: Op
    values: list[Value]
    named: dict[str, Any]

    def shape(self, argument: Any) -> tuple[int, ...]:
        number = argument.value if isinstance(argument, Ref) else argument
        return self.values[number].shape

    def tensor(self, name: str) -> Ref | None:
        found = self.named.get(name)
        return found if isinstance(found, Ref) else None

    def tensors(self, *names: str) -> list[Ref]:
        return [found for name in names if (found := self.tensor(name)) is not None]

    @property
    def out(self) -> int:
        return self.op.outputs[0]

    def dim(self, name: str = "dim", *, of: tuple[int, ...], default: int = 0) -> int:
        found = self.named.get(name)
        return int(default if found is None else found) % max(len(of), 1)


def bind(op: Op, values: list[Value]) -> BoundOp:
    schema = op.overload._schema
    named: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(op.args) and not argument.kwarg_only:
            named[argument.name] = op.args[position]
        elif argument.name in op.kwargs:
            named[argument.name] = op.kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return BoundOp(op, values, named)


def aligned(
    places: Iterable[tuple[int, tuple[int, ...]]], out: Sequence[int], leave_out: Iterable[int] = ()
) -> DimLinks:
    """Operands aligned with `out` from the right, as in broadcasting; dimensions of size 1 are omitted."""
    skipped = set(leave_out)
    groups: list[list[Place]] = [[] for _ in out]
    for value, shape in places:
        for dim, size in enumerate(shape):
            at = dim + len(out) - len(shape)
            if at >= 0 and at not in skipped and size == out[at] and size != 1:
                groups[at].append((value, dim))
    return DimLinks(carried=[group for group in groups if group])
