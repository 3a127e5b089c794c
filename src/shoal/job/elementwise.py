"""May a job's optimiser be given slices of parameters, single parameters, or only all of them together?

Names do not tell (a wrapper may hide anything), so it is tried in float64, on copies of the job's own parameters in
their own groups. One optimiser steps all of them; others step the same numbers as the engine would give them to two
ranks: flat, joined, cut anywhere. Gradients of very different sizes, gradients of zero and parameters without a
gradient are among them. What agrees after every step to 1e-12 is element-wise. Otherwise each parameter is stepped by
an optimiser of its own. What still differs couples parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.job.errors import JobError
from shoal.job.groups import Options, no_options
from shoal.job.kept import common, exact, holds_parameters, is_plain, layers, state_of

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Kind = Literal["elementwise", "parameter", "coupled"]

TOLERANCE = 1e-12
LOW_PRECISION = 1e-5
"""Where state is kept in less than float64: the last bit depends on where a vector loop ends."""
SMALL, STEPS = 1 << 12, 12
"""All shapes, shrunk to this number of elements, are stepped this often: long enough for what starts late."""
LARGE, LARGE_STEPS = 1 << 19, 3
"""The two largest parameters also take part at up to this size, twice the engine's longest slice."""
CUTS = (1, 7, 64, 1000, 1 << 18)
"""Lengths of slices, in turn."""
TROUBLE = (ValueError, RuntimeError, IndexError, TypeError, AssertionError, AttributeError, KeyError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What an optimiser needs."""

    kind: Kind
    """`elementwise`: slices will do. `parameter`: full parameters, each for itself. `coupled`: all of them at once."""
    name: str
    why: str = ""
    """Why it is not element-wise."""
    needs_closure: bool = False
    """Whether `step` has to be given a function that computes the loss again (LBFGS)."""
    has_lr: bool = True
    kept: dict[str, Any] = field(default_factory=dict)
    """What it keeps after some steps on small copies, by where it is kept: what a checkpoint will have to hold."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Objects with changing contents that no checkpoint can hold: where, and of what type."""

    @property
    def elementwise(self) -> bool:
        return self.kind == "elementwise"

    @property
    def coupled(self) -> bool:
        return self.kind == "coupled"


@dataclass(frozen=True)
class _Copy:
    """A parameter as the probe sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    which: int
    """Its group."""
    options: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class _Tensor:
    """What an optimiser is given: ranges of copies, laid end to end."""

    which: int
    shape: tuple[int, ...]
    sources: tuple[tuple[int, int, int], ...]
    """(copy, first element, end)."""
    attributes: dict[str, Any] = field(default_factory=dict)


Layout = list[list[_Tensor]]
"""For each rank, the tensors that its optimiser steps."""
Row = list[Tensor | None]
"""The gradients of one step, one for each copy."""


def probe(optimizer: OptimizerFactory, model: nn.Module, options: Options = no_options) -> Probe:
    """Tries an optimiser on copies of a model's parameters; the model may be one without memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        copies = _copies(model, options)
        small = [_shrunk(copy, SMALL) for copy in copies]
        rows = _gradients(small, STEPS, absent=True)
        try:
            reference = _Run(optimizer, small, _full(small))
            wanted = reference.train(rows)
        except TROUBLE:
            # One that expects a gradient of every parameter is a plain loop's to judge: here all have one.
            rows = _gradients(small, STEPS, absent=False)
            reference, wanted = _reference(optimizer, small, rows)
        found = reference.described()
        if reference.needs_closure:
            return Probe(kind="coupled", why="its step computes the loss again", **found)
        why = reference.unsliceable() or _differs(optimizer, small, _sliced(small, rows), rows, wanted, reference)
        large = _enlarged(copies, small)
        if not why and large is not None:
            rows_of_large = _gradients(large, LARGE_STEPS, absent=False)
            run = _Run(optimizer, large, _full(large))
            wanted_of_large = run.train(rows_of_large)
            why = _differs(optimizer, large, _sliced(large, rows_of_large), rows_of_large, wanted_of_large, run)
        if not why:
            return Probe(kind="elementwise", **found)
        coupling = _differs(optimizer, small, _alone(small), rows, wanted, reference)
        return Probe(kind="coupled" if coupling else "parameter", why=coupling or why, **found)


class _Run:
    """Optimisers over one layout of the copies, all starting alike."""

    def __init__(self, factory: OptimizerFactory, copies: Sequence[_Copy], layout: Layout) -> None:
        self.copies, self.layout = copies, layout
        self.params = [[_param(tensor, copies) for tensor in rank] for rank in layout]
        self.placeholders: list[list[tuple[int, nn.Parameter]]] = []
        self.groups: list[list[dict[str, Any]]] = []
        self.optimizers = []
        for rank, params in zip(layout, self.params, strict=True):
            groups, empty = _groups(copies, rank, params)
            self.placeholders.append(empty)
            self.groups.append([dict(group) for group in groups])
            self.optimizers.append(factory(groups))
        given = {id(param) for group in self.groups[0] for param in group["params"]}
        held = {id(param) for group in self.optimizers[0].param_groups for param in group["params"]}
        self.name = type(self.optimizers[0]).__name__
        if given != held:
            raise JobError(
                f"{self.name} does not hold the parameters that it was given: the function `optimizer` must pass its "
                "groups on, as in lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
            )
        self.needs_closure = needs_closure(self.optimizers[0])
        self._before = {where: exact(value) for where, value in self.common(0).items()}

    def train(self, rows: Sequence[Row], *, sparse: bool = False) -> list[list[Tensor]]:
        """The copies after every step."""
        return list(self.stepping(rows, sparse=sparse))

    def stepping(self, rows: Sequence[Row], *, sparse: bool = False) -> Iterator[list[Tensor]]:
        for row in rows:
            for optimizer, rank, params, empty in zip(
                self.optimizers, self.layout, self.params, self.placeholders, strict=True
            ):
                for tensor, param in zip(rank, params, strict=True):
                    gradient = _joined(row, tensor)
                    param.grad = gradient if gradient is None or not sparse else gradient.to_sparse()
                for which, param in empty:
                    has = any(g is not None for g, copy in zip(row, self.copies, strict=True) if copy.which == which)
                    param.grad = torch.zeros_like(param) if has else None
                if self.needs_closure:
                    optimizer.step(_closure(params))
                else:
                    optimizer.step()
            yield self.values()

    def values(self) -> list[Tensor]:
        found = [torch.empty(copy.numel, dtype=copy.dtype) for copy in self.copies]
        for rank, params in zip(self.layout, self.params, strict=True):
            for tensor, param in zip(rank, params, strict=True):
                flat, at = param.detach().reshape(-1), 0
                for copy, start, stop in tensor.sources:
                    found[copy][start:stop] = flat[at : at + stop - start]
                    at += stop - start
        return found

    def common(self, rank: int) -> dict[str, Any]:
        kept = common(self.optimizers[rank])
        return {f"{where}: {key!r}": value for where, entries in kept.items() for key, value in entries.items()}

    def states(self) -> Iterator[tuple[str, nn.Parameter, Any]]:
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            for param in params:
                for key, value in state_of(optimizer, param).items():
                    yield key, param, value

    def described(self) -> dict[str, Any]:
        """What of a `Probe` does not depend on other layouts."""
        kept, opaque = {}, {}
        params = {id(param) for row in self.params for param in row}
        for where, value in self.common(0).items():
            if holds_parameters(value, params) and is_plain(value):
                continue
            changed = self._before.get(where) != exact(value)
            if changed and is_plain(value):
                kept[where] = value
            elif changed:
                opaque[where] = type(value).__name__
        for key, _, value in self.states():
            if is_plain(value):
                kept.setdefault(f"state of a parameter: {key!r}", value)
            else:
                opaque[f"state of a parameter: {key!r}"] = type(value).__name__
        has_lr = all("lr" in group for group in self.optimizers[0].param_groups)
        return {
            "name": self.name, "needs_closure": self.needs_closure, "has_lr": has_lr, "kept": kept, "opaque": opaque,
        }  # fmt: skip

    def unsliceable(self) -> str:
        """What keeps parameters from being exchanged for slices, apart from results; empty if nothing does."""
        wanted = [[id(param) for param in group["params"]] for group in self.groups[0]]
        for _, each in layers(self.optimizers[0]):
            if [[id(param) for param in group["params"]] for group in each.param_groups] != wanted:
                return "it arranges its parameters in groups of its own"
        params = {id(param) for row in self.params for param in row}
        for where, value in self.common(0).items():
            if holds_parameters(value, params):
                return f"it keeps a list of its parameters ({where})"
        return ""

    def tolerance(self) -> float:
        tensors = (leaf for _, _, value in self.states() for leaf in _tensors(value))
        low = any(leaf.is_floating_point() and leaf.dim() and leaf.dtype != torch.float64 for leaf in tensors)
        return LOW_PRECISION if low else TOLERANCE


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot be called without a function that computes the loss."""
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return False
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.default is inspect.Parameter.empty and each.kind not in free for each in parameters)


def _reference(factory: OptimizerFactory, copies: list[_Copy], rows: list[Row]) -> tuple[_Run, list[list[Tensor]]]:
    run = _Run(factory, copies, _full(copies))
    try:
        return run, run.train(rows)
    except TROUBLE:
        try:
            _Run(factory, copies, _full(copies)).train(rows, sparse=True)
        except TROUBLE:
            pass
        else:
            raise JobError(
                f"{run.name} takes sparse gradients only, and Shoal sums gradients as dense tensors; use an optimiser "
                "that takes dense ones, such as torch.optim.Adam"
            ) from None
        raise


def _differs(
    factory: OptimizerFactory, copies: list[_Copy], layout: Layout, rows: list[Row], wanted: list[list[Tensor]],
    reference: _Run,
) -> str:  # fmt: skip
    """How another layout departs from the reference; empty if it does not."""
    alone = len(layout) == len(copies) and all(len(rank) == 1 for rank in layout)
    how = "by an optimiser of its own" if alone else "in slices"
    try:
        run = _Run(factory, copies, layout)
        tolerance = reference.tolerance()
        for after, expected in zip(run.stepping(rows), wanted, strict=True):
            for copy, mine, other in zip(copies, after, expected, strict=True):
                if not torch.allclose(mine, other, rtol=tolerance, atol=tolerance, equal_nan=True):
                    return f"{copy.name} differs when it is stepped {how}"
    except TROUBLE as error:
        return f"it cannot step parameters {how} ({error})"
    params = {id(param) for each in (run, reference) for row in each.params for param in row}
    expected_common = reference.common(0)
    for rank, tensors in enumerate(layout):
        for where, value in run.common(rank).items():
            place = where
            if alone and "group 0:" in where:
                place = where.replace("group 0:", f"group {tensors[0].which}:")
            other = expected_common.get(place)
            if is_plain(value) and not holds_parameters(value, params) and not _alike(value, other):
                return f"what it keeps for all parameters ({place}) depends on which it is given"
    if alone:
        return ""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for each in (run, reference):
        for key, param, value in each.states():
            sized = isinstance(value, Tensor) and value.dim() > 0 and value.numel() == param.numel()
            if not sized and param.numel() > 1:
                shapes.setdefault(key, set()).update(tuple(leaf.shape) for leaf in _tensors(value))
    varying = next((key for key, seen in shapes.items() if len(seen) > 1), None)
    return f"it keeps {varying!r} in a shape of its own" if varying is not None else ""


def _alike(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= 1e-9 * max(abs(value), abs(other)) or value != value
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        same = value.shape == other.shape and value.dtype == other.dtype
        return same and bool(torch.allclose(value, other, rtol=1e-9, atol=0.0, equal_nan=True))
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_alike, value, other))
    return exact(value) == exact(other)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)


def _copies(model: nn.Module, options: Options) -> list[_Copy]:
    """The trainable parameters, of those of one shape and with the same options the first and the last."""
    known: list[dict[str, Any]] = []
    kinds: dict[Any, list[_Copy]] = {}
    order: dict[str, int] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        mine = dict(options(name, param))
        if mine not in known:
            known.append(mine)
        attributes = attributes_of(param)
        dtype = torch.complex128 if param.is_complex() else torch.float64
        copy = _Copy(name, tuple(param.shape), dtype, known.index(mine), mine, attributes)
        order[name] = len(order)
        kind = kinds.setdefault((copy.shape, copy.dtype, copy.which, repr(sorted(attributes.items()))), [])
        if len(kind) == 2:
            kind.pop()
        kind.append(copy)
    return sorted((copy for kind in kinds.values() for copy in kind), key=lambda copy: order[copy.name])


def attributes_of(param: Tensor) -> dict[str, Any]:
    """Marks that a model sets on its parameters, for an optimiser to look at."""
    return {key: value for key, value in vars(param).items() if not key.startswith("_")}


def _shrunk(copy: _Copy, most: int) -> _Copy:
    shape = list(copy.shape)
    while prod(shape) > most:
        largest = shape.index(max(shape))
        shape[largest] = -(-shape[largest] // 2)
    return _Copy(copy.name, tuple(shape), copy.dtype, copy.which, copy.options, copy.attributes)


def _enlarged(copies: list[_Copy], small: list[_Copy]) -> list[_Copy] | None:
    largest = sorted(range(len(copies)), key=lambda place: -copies[place].numel)[:2]
    if not largest or copies[largest[0]].numel <= SMALL:
        return None
    return [_shrunk(copy, LARGE) if place in largest else small[place] for place, copy in enumerate(copies)]


def _start(copy: _Copy, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + place)
    return torch.randn(copy.numel, generator=generator, dtype=copy.dtype) * 0.5


def _gradients(copies: Sequence[_Copy], steps: int, *, absent: bool) -> list[Row]:
    """Sizes differ by up to 1e5 between parameters and by 300 within one: whatever is normalised shows."""
    generator = torch.Generator().manual_seed(11)
    rows: list[Row] = []
    for step in range(steps):
        row: Row = []
        for place, copy in enumerate(copies):
            within = torch.linspace(0.01, 3.0, copy.numel, dtype=torch.float64)
            size = 10.0 ** ((place * 7 + step * 3) % 6 - 4)
            gradient = torch.randn(copy.numel, generator=generator, dtype=copy.dtype) * within * size
            # No gradient but that of the first; then none of the first; then zeros.
            if absent and ((step == 3 and place) or (step == 4 and not place and len(copies) > 1)):
                row.append(None)
            else:
                row.append(gradient * 0 if step == 6 and place % 2 == 0 else gradient)
        rows.append(row)
    return rows


def _full(copies: Sequence[_Copy]) -> Layout:
    return [[_whole(copy, place) for place, copy in enumerate(copies)]]


def _alone(copies: Sequence[_Copy]) -> Layout:
    return [[_whole(copy, place)] for place, copy in enumerate(copies)]


def _whole(copy: _Copy, place: int) -> _Tensor:
    return _Tensor(copy.which, copy.shape, ((place, 0, copy.numel),), copy.attributes)


def _sliced(copies: Sequence[_Copy], rows: Sequence[Row]) -> Layout:
    """As the engine shards: parameters of one group end to end, from the last to the first, cut between two ranks and
    into slices; one that was ever without a gradient is not joined with others."""
    skipped = {place for row in rows for place, gradient in enumerate(row) if gradient is None}
    runs: list[tuple[int, list[tuple[int, int, int]]]] = []
    ordered = sorted(range(len(copies)), key=lambda place: (copies[place].which, -place))
    middle, at = sum(copy.numel for copy in copies) * 9 // 20, 0
    ranks: list[list[tuple[int, list[tuple[int, int, int]]]]] = [[], []]
    for place in ordered:
        copy = copies[place]
        cut = min(max(middle - at, 0), copy.numel)
        for rank, (start, stop) in enumerate(((0, cut), (cut, copy.numel))):
            runs = ranks[rank]
            if start == stop:
                continue
            before = runs[-1] if runs else None
            joins = before is not None and before[0] == copy.which and before[1][-1][0] not in skipped
            if joins and place not in skipped:
                runs[-1][1].append((place, start, stop))
            else:
                runs.append((copy.which, [(place, start, stop)]))
        at += copy.numel
    return [[tensor for which, run in each for tensor in _chunks(which, run, copies)] for each in ranks]


def _chunks(which: int, run: list[tuple[int, int, int]], copies: Sequence[_Copy]) -> Iterator[_Tensor]:
    total, at, turn = sum(stop - start for _, start, stop in run), 0, 0
    while at < total:
        end = min(at + CUTS[turn % len(CUTS)], total)
        sources, offset = [], 0
        for place, start, stop in run:
            low, high = max(at - offset, 0), min(end - offset, stop - start)
            if low < high:
                sources.append((place, start + low, start + high))
            offset += stop - start
        # One type in a tensor: complex parameters are never joined with others.
        for dtype in dict.fromkeys(copies[place].dtype for place, _, _ in sources):
            own = tuple(source for source in sources if copies[source[0]].dtype == dtype)
            yield _Tensor(which, (sum(stop - start for _, start, stop in own),), own)
        at, turn = end, turn + 1


def _param(tensor: _Tensor, copies: Sequence[_Copy]) -> nn.Parameter:
    parts = [_start(copies[place], place)[start:stop] for place, start, stop in tensor.sources]
    param = nn.Parameter(torch.cat(parts).view(tensor.shape))
    vars(param).update(tensor.attributes)
    return param


def _joined(row: Row, tensor: _Tensor) -> Tensor | None:
    parts = [(row[place], start, stop) for place, start, stop in tensor.sources]
    found = [gradient[start:stop] for gradient, start, stop in parts if gradient is not None]
    return torch.cat(found).view(tensor.shape) if len(found) == len(parts) else None


def _groups(
    copies: Sequence[_Copy], rank: list[_Tensor], params: list[nn.Parameter]
) -> tuple[list[dict[str, Any]], list[tuple[int, nn.Parameter]]]:
    """The groups of one rank. Where slices are given, a rank that lacks parameters of a group has a parameter without
    elements there, as in the engine."""
    options: dict[int, dict[str, Any]] = {copy.which: copy.options for copy in copies}
    sliced = any(tensor.shape != copies[tensor.sources[0][0]].shape or len(tensor.sources) > 1 for tensor in rank)
    groups, empty = [], []
    for which in sorted(options):
        mine = [param for tensor, param in zip(rank, params, strict=True) if tensor.which == which]
        if sliced:
            placeholder = nn.Parameter(torch.zeros(0, dtype=torch.float64))
            empty.append((which, placeholder))
            mine.append(placeholder)
        if mine:
            groups.append({"params": mine, **options[which]})
    return groups, empty


def _closure(params: list[nn.Parameter]) -> Callable[[], Tensor]:
    """A loss whose minimum lies where the gradients given point."""
    goals = [param.detach() - (0 if param.grad is None else param.grad) for param in params]

    def closure() -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for param, goal in zip(params, goals, strict=True):
            param.grad = param.detach() - goal
            loss = loss + 0.5 * param.grad.abs().square().sum()
        return loss

    return closure
