"""Code that was written for full images, run where each rank holds its part of them.

Tensors that are cut report the size of the full one, so that what the code computes from sizes comes out as in one
process. Each function that is given a cut tensor is followed once (`program.py`). What is then done by it differs:
ranks compute on parts, a forecast computes in full and notes what ranks would send. Both are subclasses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.layout.recorded import Ref
from shoal.layout.spatial.grid import FULL, Grid, Part
from shoal.layout.spatial.program import Program, followed

MOST_PROGRAMS = 4096
"""Functions remembered with their arguments; beyond, all are forgotten and followed anew."""

CONVOLUTIONS = frozenset(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)) | {
    "convolution",
    "_convolution",
}
"""Functions that cut what they are given in full."""
NORMS = ("batch_norm", "group_norm", "instance_norm")


class PlaneView(TorchFunctionMode):
    """`cuts` are the cut tensors that it has seen."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.cuts: Any = WeakTensorKeyDictionary()
        self.copied: Any = WeakTensorKeyDictionary()
        self.programs: dict[Any, Program | None] = {}

    def part(self, x: Any) -> Part:
        return self.cuts.get(x, FULL) if isinstance(x, torch.Tensor) else FULL

    def mark(self, x: torch.Tensor, part: Part) -> None:
        if part != FULL:
            self.cuts[x] = part

    def full_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        return self.grid.full_shape(tuple(x.shape), self.part(x))

    @abstractmethod
    def in_full(self, x: Any) -> Any:
        """A tensor with all of its plane."""

    @abstractmethod
    def run(self, func: Any, program: Program, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """The results of a function, each marked as the program says."""

    @abstractmethod
    def norm(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A batch, group or instance norm of a cut plane, by the statistics of all of it."""

    def sizes(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _SIZES[func](self.full_shape(args[0]), *args[1:], **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, shape = tree_flatten((args, kwargs))
        name = getattr(func, "__name__", "")
        cut = any(isinstance(leaf, torch.Tensor) and leaf in self.cuts for leaf in leaves)
        if not cut and name not in CONVOLUTIONS:
            return func(*args, **kwargs)
        if func in _OF_AUTOGRAD:
            return func(*args, **kwargs)
        if func in _SIZES:
            return self.sizes(func, args, kwargs)
        if name in NORMS and (done := self._norm(name, func, args, kwargs)) is not None:
            return done
        program = self._program(func, leaves, shape)
        if program is None:
            if not cut:
                return func(*args, **kwargs)
            args, kwargs = tree_map(self.in_full, (args, kwargs))
            return func(*args, **kwargs)
        result = self.run(func, program, leaves, args, kwargs)
        for leaf, known in zip(tree_flatten(result)[0], program.results, strict=True):
            if isinstance(known, Ref):
                self.mark(leaf, program.parts.get(known.value, FULL))
                if known.value in program.copies:
                    self.copied[leaf] = True
        return result

    def _norm(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """None where the norm needs no other rank, or is not of planes."""
        x = args[0] if args else kwargs["input"]
        part = self.part(x)
        if part == FULL or any(cut is not None and (cut.dim < 2 or not cut.is_plain) for cut in part):
            return None
        if any(isinstance(other, torch.Tensor) and other in self.cuts for other in tree_flatten((args[1:], kwargs))[0]):
            return None
        result = self.norm(name, func, args, kwargs)
        self.mark(result, part)
        return result

    def _program(self, func: Any, leaves: list[Any], shape: TreeSpec) -> Program | None:
        key = (func, shape, _autocast(), tuple(self._key(leaf, leaves) for leaf in leaves))

        def found() -> Program | None:
            return followed(func, leaves, shape, self.grid, self.part, lambda x: x in self.copied)

        try:
            known = key in self.programs
        except TypeError:  # An argument that cannot be hashed.
            return found()
        if not known:
            if len(self.programs) >= MOST_PROGRAMS:
                self.programs.clear()
            self.programs[key] = found()
        return self.programs[key]

    def _key(self, leaf: Any, leaves: list[Any]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        same = next(n for n, other in enumerate(leaves) if other is leaf)
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, self.part(leaf), leaf in self.copied, same


def _autocast() -> Any:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def _size(shape: tuple[int, ...], dim: int | None = None) -> Any:
    return torch.Size(shape) if dim is None else shape[dim]


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


_OF_AUTOGRAD = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.requires_grad_,
}
"""They change the graph of a tensor and compute nothing: a hook belongs to the part."""

_SIZES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
    torch.Tensor.size: _size,
    torch.Tensor.numel: _numel,
    torch.Tensor.nelement: _numel,
    torch.numel: _numel,
    torch.Tensor.__len__: lambda shape: shape[0],
}
