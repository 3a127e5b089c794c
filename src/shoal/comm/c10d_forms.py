"""The forms in which torch.distributed calls a group: lists or single tensors, options or a bare reduction, positional
or keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.vector import OPERATIONS, Operation

_REDUCTIONS: list[tuple[Any, tuple[Operation, bool]]] = [
    (getattr(dist.ReduceOp, name), (OPERATIONS["sum" if name == "AVG" else name.lower()], name == "AVG"))
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
]


def operation_of(reduce: Any) -> tuple[Operation, bool]:
    """The operation on two elements, and whether the result is divided by the number of ranks."""
    for known, meant in _REDUCTIONS:
        # The order of the operands matters: swapped, they never compare equal.
        if reduce == known:
            return meant
    raise ValueError(
        f"the shoal backend has no reduction {reduce}; it has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR"
    )


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def tensors_of(nested: Any) -> list[torch.Tensor]:
    return [nested] if isinstance(nested, torch.Tensor) else [tensor for part in nested for tensor in tensors_of(part)]


def options_of(given: Any, cls: Any) -> Any:
    """Options as c10d passes them; also from a bare reduction or root, as in the short forms of its methods."""
    if type(given) is cls:
        return given
    if given is None:
        return cls()
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        options = cls()
        options.reduceOp = given if isinstance(given, dist.ReduceOp) else dist.ReduceOp(given)
        return options
    if isinstance(given, int):
        options = cls()
        options.rootRank = given
        return options
    return given


def also_by_name(cls: type, *names: str) -> None:
    """These methods of a class also accept keyword arguments, in whatever order."""
    for name in names:
        setattr(cls, name, _also_by_name(vars(cls)[name]))


def _also_by_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Accepts the keyword arguments of c10d's short forms; their order is outputs, inputs, sizes, options."""
    places = ("output", "tensor", "input")

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if named:
            sizes = [named.pop(name) for name in ("output_split_sizes", "input_split_sizes") if name in named]
            last = [named.pop(name) for name in ("opts", "op", "root") if name in named]
            timeout = named.pop("timeout", None)
            given = [named.pop(name) for place in places for name in sorted(named) if name.startswith(place)]
            if named:
                raise TypeError(f"{method.__name__}() of the shoal backend has no argument {', '.join(named)}")
            args = (*args, *given, *sizes, *last)
            if timeout is not None and not last:
                raise TypeError(f"{method.__name__}(): give the timeout in the options")
        return method(self, *args)

    call.__name__ = method.__name__
    return call
