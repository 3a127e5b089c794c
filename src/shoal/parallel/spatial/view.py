"""The view of a rank: functions of PyTorch's on its part of every plane.

What a function needs of other ranks is fetched before each of its operations, sums are added up behind them. Autograd
sees parts and exchanges, and nothing else: each rank computes its term of one loss, so the gradient of a parameter is
the sum over ranks, and backward of every exchange is its transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_leaves, tree_unflatten

from shoal.layout.recorded import Ref
from shoal.layout.spatial.forms import Summed
from shoal.layout.spatial.grid import FULL, Move, Need
from shoal.layout.spatial.program import Program
from shoal.layout.spatial.view import PlaneView
from shoal.parallel.context.global_view import GlobalView
from shoal.parallel.spatial.exchange import PlaneWire, moved, summed
from shoal.parallel.spatial.local import computed, padding_of

Norm = Callable[[str, Any, Any, Any], Any]


class RankView(PlaneView):
    """`norm_by` computes norms whose statistics all ranks share."""

    def __init__(self, wire: PlaneWire, norm_by: Norm) -> None:
        super().__init__(wire.grid)
        self.wire, self._norm_by = wire, norm_by
        self.place = wire.grid.place(wire.index)
        self.depth = 0

    def __enter__(self) -> RankView:
        _guard()
        GlobalView.active.append(self)  # type: ignore[arg-type]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        GlobalView.active.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            return func(*args, **(kwargs or {}))
        with self.inside():
            return super().__torch_function__(func, types, args, kwargs)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Code in here sees tensors as they are: those that are cut as parts."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def norm(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        return self._norm_by(kind, func, args, kwargs)

    def in_full(self, x: Any) -> Any:
        part = self.part(x)
        if part == FULL:
            return x
        needs = [
            None if cut is None else Need(cut, self.grid.everything(axis, cut.length), held=True)
            for axis, cut in enumerate(part)
        ]
        with torch._C.DisableTorchFunction():
            return moved(x, Move(-1, (needs[0], needs[1]), part), self.wire)

    def run(self, func: Any, program: Program, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        if program.is_plain:
            return func(*args, **kwargs)
        held: dict[int, Any] = {value: leaves[leaf] for leaf, value in program.inputs}
        for step in program.steps:
            operands = dict(held)
            for move in step.moves:
                x = held[move.value]
                operands[move.value] = moved(x, move, self.wire, padding_of(step, x.dtype, self.place))
            results = computed(step, operands, program, self.grid, self.place)
            if isinstance(step.form, Summed):
                results = [summed(x, self.wire) for x in results]
                if step.form.weighted:
                    results[0] = results[0] / results[1]
            held.update(zip(step.op.outputs, results, strict=True))
        flat = [held[known.value] if isinstance(known, Ref) else known for known in program.results]
        return tree_unflatten(flat, program.shape)


_plain_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_plain_checkpoint = checkpointing._checkpoint_without_reentrant_generator


def _guard() -> None:
    """Autograd functions of the model's own, which no mode sees, get planes in full: what they do with a part is not
    known. Checkpoints of its own are refused: modes are off when they compute again."""
    torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    checkpointing._checkpoint_without_reentrant_generator = _checkpoint


def _active() -> RankView | None:
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, RankView)), None)


def _checkpoint(
    fn: Any, preserve: Any = True, context_fn: Any = checkpointing.noop_context_fn, *args: Any, **more: Any
) -> Any:
    if _active() is not None and context_fn is checkpointing.noop_context_fn:
        raise HiddenParts(HIDDEN)
    return _plain_checkpoint(fn, preserve, context_fn, *args, **more)


def _apply(cls: Any, *args: Any) -> Any:
    view = _active()
    free = view is not None and not view.depth and not torch._C._is_torch_function_all_disabled()
    if view is not None and free and any(view.part(x) != FULL for x in tree_leaves(args)):
        if cls is checkpointing.CheckpointFunction:
            raise HiddenParts(HIDDEN)
        args = tuple(view.in_full(x) for x in args)
    return _plain_apply(cls, *args)


HIDDEN = (
    "the model calls torch.utils.checkpoint by itself, and what it then computes again does not see that planes are "
    "cut; leave that out, and put recompute('full') in the strategy"
)


class HiddenParts(ValueError):
    """The model's own checkpointing hides parts from the ranks that hold them."""
