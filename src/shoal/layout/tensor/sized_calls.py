"""Calls that name sizes: `view(B, T, C)`, `unflatten(-1, (heads, -1))`, `split(C, dim=2)`.

Code often takes such sizes from its input or contains them as constants, so that no attribute holds them. Here a call
is parsed and repeated with other sizes, and the calls of one forward are recorded with the module that makes them. At
the level of ATen operations they are lost: a `reshape` is a view or a copy, depending on strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.layout.cuts import Cut

NAMES: dict[Any, str] = {
    torch.Tensor.view: "view",
    torch.Tensor.reshape: "reshape",
    torch.reshape: "reshape",
    torch.Tensor.expand: "expand",
    torch.Tensor.broadcast_to: "expand",
    torch.broadcast_to: "expand",
    torch.Tensor.unflatten: "unflatten",
    torch.unflatten: "unflatten",
    torch.Tensor.split: "split",
    torch.split: "split",
    torch.Tensor.split_with_sizes: "split",
    torch.split_with_sizes: "split",
}
KEYWORDS = ("size", "shape", "sizes", "split_size_or_sections", "split_size", "split_sizes")


@dataclass(frozen=True, slots=True)
class SizedCall:
    """One such call, as it is made."""

    function: str
    call: Any
    source: torch.Tensor
    sizes: tuple[int, ...]
    dim: int
    """The dimension that `unflatten` or `split` divides."""
    is_list: bool
    """For `split`: whether each part's size is given, rather than one size for all."""

    def again(self, sizes: tuple[int, ...]) -> Any:
        """Makes the call with other sizes."""
        if self.function == "split":
            return self.call(self.source, list(sizes) if self.is_list else sizes[0], self.dim)
        if self.function == "unflatten":
            return self.call(self.source, self.dim, sizes)
        return self.call(self.source, sizes)

    def asked(self) -> tuple[int, int] | None:
        """(number of entries by the given sizes, actual number); None if the sizes contain a -1."""
        if -1 in self.sizes or self.function == "expand" or (self.function == "split" and not self.is_list):
            return None
        if self.function == "split":
            return sum(self.sizes), self.source.size(self.dim)
        there = self.source.size(self.dim) if self.function == "unflatten" else self.source.numel()
        return math.prod(self.sizes), there


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SizedCall | None:
    """The call, if it is one that names sizes."""
    function = NAMES.get(func)
    if function is None or not isinstance(source := args[0] if args else kwargs.get("input"), torch.Tensor):
        return None
    rest: tuple[Any, ...] = args[1:]
    dim, sizes = 0, cast(Any, None)
    if function == "unflatten" and ("dim" in kwargs or rest):
        dim, rest = (kwargs["dim"], rest) if "dim" in kwargs else (rest[0], rest[1:])
    if kwargs:
        sizes = next((kwargs[name] for name in KEYWORDS if name in kwargs), None)
    if sizes is None and rest:
        sizes, rest = rest[0], rest[1:]
    if function == "split":
        dim = kwargs.get("dim", rest[0] if rest else 0)
    elif rest:
        sizes = (sizes, *rest)
    is_list = isinstance(sizes, (tuple, list))
    found = tuple(sizes) if is_list else (sizes,)
    if not found or {*map(type, found), type(dim)} != {int}:
        # A view as another dtype names no size; a size that is a tensor is unknown before the code runs.
        if not found or not all(isinstance(size, (int, np.integer)) for size in (*found, dim)):
            return None
        found, dim = tuple(int(size) for size in found), int(dim)
    return SizedCall(function, func, source, found, dim if dim >= 0 else dim + source.dim(), is_list)


def places(function: str, sizes: tuple[int, ...], dim: int, cuts: list[Cut]) -> tuple[int, ...]:
    """Indices of the call's sizes that belong to the dimension along which all its results are split; none if that size
    is -1 and adapts by itself."""
    dims = {cut.dim for cut in cuts}
    if len(dims) != 1:
        return ()
    (at,) = dims
    if function == "split":
        found = tuple(range(len(sizes))) if at == dim else ()
    else:
        at = at - dim if function == "unflatten" else at
        found = (at,) if 0 <= at < len(sizes) else ()
    return () if any(sizes[place] == -1 for place in found) else found


@dataclass(frozen=True, slots=True)
class NotedCall:
    """One such call in a trace."""

    module: str
    """Path of the innermost module whose code makes it."""
    call: int
    """Number of that module call in the trace."""
    order: int
    """Its number among the sized calls of this module call."""
    function: str
    sizes: tuple[int, ...]
    dim: int
    results: tuple[int | None, ...]
    """Values; None for tensors that are not in the trace."""


class SizedCalls(TorchFunctionMode):
    """Records each sized call with the running module."""

    def __init__(
        self, running: Callable[[], tuple[int, str] | None], value_of: Callable[[torch.Tensor], int | None]
    ) -> None:
        """`running`: number and path of the innermost module call. `value_of`: the trace's value of a tensor."""
        super().__init__()
        self.running, self.value_of = running, value_of
        self.found: list[NotedCall] = []
        self._counts: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = read(func, args, kwargs)
        result = func(*args, **kwargs)
        where = self.running() if call is not None else None
        if call is not None and where is not None:
            order = self._counts.get(where[0], 0)
            self._counts[where[0]] = order + 1
            results = tuple(self.value_of(leaf) for leaf in tree_leaves(result))
            self.found.append(NotedCall(where[1], where[0], order, call.function, call.sizes, call.dim, results))
        return result
