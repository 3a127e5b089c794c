"""What ranks of spatial will exchange, from one serial forward: each function is followed as ranks follow it, and then
computed in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from shoal.job import Job
from shoal.job.facts import build_without_memory
from shoal.layout.global_view import FUSED_ATTENTION, CannotFollow
from shoal.layout.recorded import Op
from shoal.layout.spatial.forms import Summed
from shoal.layout.spatial.grid import FULL, Grid, Move, Need, Part
from shoal.layout.spatial.plan import PlaneEvent, SpatialPlan
from shoal.layout.spatial.program import Program
from shoal.layout.spatial.view import PlaneView

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


LEAST_SHARE = 0.1
"""Of the work on products and convolutions: with less of it on parts, ranks would mostly compute the same."""


NO_CONVOLUTION = "the model has no convolution, and only convolutions are cut"


class CannotCutPlanes(ValueError):
    """Nothing of a model can be computed on parts of planes."""


class Forecast(PlaneView):
    """`now` gives the position of what happens, `module` the running module."""

    def __init__(self, grid: Grid, now: Callable[[], int], module: Callable[[], str]) -> None:
        super().__init__(grid)
        self.now, self.module = now, module
        self.events: list[PlaneEvent] = []
        self.work = 0.0
        """Of products on parts."""
        self.gathered: dict[tuple[str, str], None] = {}
        self.planes: dict[str, tuple[int, ...]] = {}
        self.modules: set[str] = set()
        """Those that compute on parts."""
        self.whole: dict[str, None] = {}
        self.in_norm = False
        self._made: list[tuple[int, int, list[Any]]] = []
        """For each function: the first and the last of its events, and where backward would come to it."""
        self._cause = ""

    def in_full(self, x: Any) -> Any:
        part = self.part(x)
        if part == FULL:
            return x
        needs = [
            None if cut is None else Need(cut, self.grid.everything(axis, cut.length), held=True)
            for axis, cut in enumerate(part)
        ]
        self.gathered[self.module(), self._cause] = None
        noted = len(self.events)
        self._move(Move(-1, (needs[0], needs[1]), part), tuple(x.shape), x.element_size(), _learns(x))
        # Another tensor, as it is on ranks: this one stays cut.
        with torch._C.DisableTorchFunction():
            return self._watched(int(len(self.events) > noted), x.view_as, (x,), {})

    def run(self, func: Any, program: Program, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        noted = len(self.events)
        if any(part != FULL for part in program.parts.values()):
            self.modules.add(self.module())
        learning = program.learning(lambda leaf: isinstance(leaves[leaf], torch.Tensor) and _learns(leaves[leaf]))
        for step in program.steps:
            for move in step.moves:
                value = program.values[move.value]
                self._cause = step.op.name
                self._move(move, value.shape, value.dtype.itemsize, move.value in learning)
            cut = any(part != FULL for part in step.outputs.values()) or isinstance(step.form, Summed)
            if not cut and any(move.travels(self.grid) for move in step.moves):
                self.gathered[self.module(), step.op.name] = None
            if step.op.name in PRODUCTS:
                self._product(step.op, program, cut)
            if isinstance(step.form, Summed):
                for out in step.op.outputs:
                    value = program.values[out]
                    self._note("sum", value.shape, value.dtype.itemsize, out in learning, why=step.op.name)
        self._cause = ""
        return self._watched(len(self.events) - noted, func, args, kwargs)

    def norm(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.modules.add(self.module())
        if kind != "batch_norm":
            x = args[0] if args else kwargs["input"]
            groups = x.shape[1]
            if kind == "group_norm":
                groups = args[1] if len(args) > 1 else kwargs["num_groups"]
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            width = torch.promote_types(x.dtype, torch.float32).itemsize
            self._note("norm", (x.shape[0] * groups,), width, any(map(_learns, tensors[:1])), why=kind)
            return self._watched(1, func, args, kwargs)
        self.in_norm = True
        try:
            return func(*args, **kwargs)
        finally:
            self.in_norm = False

    def _watched(self, events: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls the function that the last events belong to."""
        result = func(*args, **kwargs)
        if events:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            ends = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
            self._made.append((len(self.events) - events, len(self.events), ends))
        return result

    def settle(self, loss: Any) -> None:
        """Once the loss is known: gradients come back only for what it depends on."""
        reached = reached_by(loss)
        for first, stop, ends in self._made:
            if reached and not reached.intersection(ends):
                self.events[first:stop] = [replace(event, learns=False) for event in self.events[first:stop]]

    def _move(self, move: Move, shape: tuple[int, ...], itemsize: int, learns: bool) -> None:
        if not move.travels(self.grid):
            return
        self._note("move", shape, itemsize, learns, move, why=self._cause)

    def _note(
        self, kind: Any, shape: tuple[int, ...], itemsize: int, learns: bool, move: Move | None = None, *, why: str = ""
    ) -> None:
        self.events.append(
            PlaneEvent(
                at=self.now(),
                module=self.module(),
                kind=kind,
                shape=tuple(shape),
                itemsize=itemsize,
                learns=learns,
                move=move,
                why=why,
            )
        )

    def _product(self, op: Op, program: Program, cut: bool) -> None:
        shapes = [program.values[value].shape for value in (*op.inputs, *op.outputs)]
        if op.name == "convolution":
            if cut:
                self.planes.setdefault(self.module(), shapes[-1][2:])
            else:
                self.whole.setdefault(self.module())
        if cut:
            self.work += _work(op.name, shapes, transposed=op.name == "convolution" and bool(op.args[6]))


def reached_by(loss: Any) -> set[Any]:
    """The functions of autograd to which backward from a loss comes; empty if it has none."""
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return set()
    reached, ahead = {loss.grad_fn}, [loss.grad_fn]
    while ahead:
        behind = {node for node, _ in ahead.pop().next_functions if node is not None} - reached
        reached |= behind
        ahead += behind
    return reached


def _work(name: str, shapes: list[tuple[int, ...]], *, transposed: bool = False) -> float:
    """Multiplications of a product, from the shapes of its operands and its result."""
    if name == "convolution":
        return prod(shapes[0] if transposed else shapes[-1]) * prod(shapes[1]) / max(1, shapes[1][0])
    if name in FUSED_ATTENTION:
        return 2.0 * prod(shapes[0]) * shapes[1][-2]
    return float(prod(shapes[-3]) * shapes[-2][-1])


class _Total(TorchDispatchMode):
    """The work of all products of a forward."""

    work = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS or name in FUSED_ATTENTION:
            shapes = [tuple(leaf.shape) for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            if name in PRODUCTS:
                result_at = 3 if name in ("addmm", "baddbmm") else 2
                shapes = [*shapes[: max(2, result_at)], tuple(tree_leaves(result)[0].shape)]
            self.work += _work(name, shapes, transposed=name == "convolution" and bool(args[6]))
        return result


def _learns(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _Calls:
    """How what modules are given and return is cut."""

    def __init__(self, grid: Grid) -> None:
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.forecast = Forecast(grid, lambda: 0, lambda: self.open[-1] if self.open else "")
        self.results: dict[tuple[str, int], tuple[Part, ...]] = {}
        self.arguments: dict[tuple[str, int], tuple[Part, ...]] = {}
        self._numbers: list[int] = []

    def _parts(self, tree: Any) -> tuple[Part, ...]:
        return tuple(self.forecast.part(leaf) for leaf in tree_flatten(tree)[0])

    def enter(self, path: str, args: Any, kwargs: Any) -> None:
        number = self.counts.get(path, 0)
        self.counts[path] = number + 1
        self.open.append(path)
        self._numbers.append(number)
        self.arguments[path, number] = self._parts((args, kwargs))

    def leave(self, module: nn.Module, output: Any) -> None:
        self.results[self.open.pop(), self._numbers.pop()] = self._parts(output)


def spatial_plan(job: Job, sizes: tuple[int, int], samples: int) -> SpatialPlan:
    """The plan of a job's model and its loss. Raises CannotCutPlanes, with the module and the reason, where nothing
    would be computed on parts."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shoal.layout.trace import faked, reporting_calls

    calls, total = _Calls(Grid(sizes)), _Total()
    batch = job.train.batch(np.arange(min(samples, len(job.train))))

    def run(calls: _Calls, total: _Total, model: nn.Module, batch: Any) -> None:
        model.train()
        with reporting_calls(model, calls, before_own_hooks=True), total, calls.forecast:
            output = job.run_model(model, batch)
            if job.loss_over != "batch":
                job.loss_of(output, batch)

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                model = faked(build_without_memory(job), mode)
                with mode:
                    run(calls, total, model, {k: mode.from_tensor(v) for k, v in batch.items()})
            except CannotFollow:
                raise
            except Exception:
                calls, total = _Calls(Grid(sizes)), _Total()
                run(calls, total, job.model(), batch)
    except CannotFollow as refusal:
        raise CannotCutPlanes(str(refusal)) from None
    forecast = calls.forecast
    share = forecast.work / max(total.work, 1.0)
    if share < LEAST_SHARE:
        raise CannotCutPlanes(_nothing_gained(forecast, share))
    return SpatialPlan(
        sizes=sizes,
        events=tuple(forecast.events),
        cut_share=share,
        gathered=tuple(forecast.gathered),
        planes=tuple(forecast.planes.items()),
        whole=tuple(forecast.whole),
        modules=frozenset(forecast.modules),
        results=calls.results,
        arguments=calls.arguments,
    )


def _nothing_gained(forecast: Forecast, share: float) -> str:
    """Why ranks would compute mostly the same."""
    if not forecast.planes and not forecast.whole:
        return NO_CONVOLUTION
    if not forecast.planes:
        return f"no convolution has a plane of as many rows as ranks ({next(iter(forecast.whole))} has not)"
    where, operation = next(iter(forecast.gathered), (next(iter(forecast.planes)), "what follows"))
    return (
        f"only {100 * share:.0f}% of the work on products lies on planes; {where or 'the model itself'} "
        f"({operation or 'a function'}) needs them in full, and behind it all ranks would compute the same"
    )
