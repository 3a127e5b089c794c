"""Where a model can be cut into pipeline stages: its pieces in execution order, and the tensors between them.

A piece is a module with parameters: a block, or a module outside the blocks (an embedding, a final norm, a head).
`wires.py` finds which tensors cross a cut before a piece, and why a cut is impossible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.job.errors import did_you_mean
from shoal.layout.blocks import blocks
from shoal.layout.cost import cost
from shoal.layout.recorded import Trace, TracedCall, ValueRead
from shoal.layout.wires import ValueLifetimes, Wire


@dataclass(frozen=True, slots=True)
class Written:
    """A buffer that the code between pieces changes."""

    piece: int
    """The piece after which it is changed for the last time."""
    own: bool
    """Whether only that stage can change it; otherwise every stage that reaches this code does."""


@dataclass(frozen=True, slots=True)
class Given:
    """What one call of a piece returns, flattened."""

    passed: Mapping[int, int]
    """Result that is itself an argument -> index of that argument."""
    learning: frozenset[int]
    """Results that require a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPiece:
    """One piece of the model."""

    path: str
    is_block: bool
    cost: float
    """Cost of one forward, from here to the next piece."""
    parameters: frozenset[str]
    """Names of the parameters that it holds, or that are read from here to the next piece."""
    wires: tuple[Wire, ...]
    """What crosses a cut just before it."""
    why_not: str
    """Why there can be no cut just before it; empty if there can."""
    same_as_argument: int | None
    """If it returns one tensor of the same shape and dtype as one of its arguments: the index of that argument."""
    calls: tuple[Given, ...] = ()
    """What each of its calls returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The pieces of a model, first to last."""

    links: tuple[ModelPiece, ...]
    tied: frozenset[str]
    """Parameters that are read by more than one piece."""
    written: Mapping[str, Written]
    """Buffers outside the pieces that a forward changes."""
    renewed: tuple[str, ...] = ()
    """Buffers that a forward changes and reads: the backward of a micro-batch may need their value of its forward."""
    uncalled: tuple[str, ...] = ()
    """Modules with parameters, outside the pieces, that the forward did not call."""

    def cuts(self) -> list[int]:
        """Pieces before which the model can be cut."""
        return [number for number, link in enumerate(self.links) if number and not link.why_not]

    def stages(
        self, num: int, *, balanced: bool = True, declared: Sequence[str] | None = None
    ) -> list[tuple[int, int]]:
        """The pieces of each stage. Minimises the cost of the most expensive stage (or, not balanced, the number of
        pieces). `declared`: paths of the pieces that start a stage; then nothing is chosen."""
        if declared is not None:
            return self._declared(num, declared)
        costs = [link.cost if balanced else 1.0 for link in self.links]
        borders = [0, *self.cuts(), len(self.links)]
        if len(borders) - 1 < num:
            raise StageCutError(
                f"the model can be cut into {len(borders) - 1} stages at most, not {num}: {self.why_not_more()}"
            )
        return _partition(costs, borders, num)

    def _declared(self, num: int, declared: Sequence[str]) -> list[tuple[int, int]]:
        numbers = {link.path: number for number, link in enumerate(self.links)}
        for path in declared:
            if path not in numbers:
                there = ", ".join(self.links[number].path for number in self.cuts()[:8]) or "nowhere"
                raise StageCutError(
                    f"layout: stages names {path!r}, which is not a piece of the model; it can be cut before {there}"
                    f"{', ...' if len(self.cuts()) > 8 else ''}.{did_you_mean(path, numbers)}"
                )
            if not numbers[path]:
                raise StageCutError(f"layout: stages names {path!r}, which is the first piece: nothing lies before it")
            if why := self.links[numbers[path]].why_not:
                raise StageCutError(f"layout: stages names {path!r}, but the model cannot be cut before it: it {why}")
        if len(declared) + 1 != num:
            raise StageCutError(
                f"layout: stages names the cuts {', '.join(declared)}, which make {len(declared) + 1} stages, but the "
                f"strategy has {num}; name {num - 1} pieces, one for each cut, or omit stages"
            )
        borders = [0, *sorted(numbers[path] for path in declared), len(self.links)]
        return list(pairwise(borders))

    def why_not_more(self) -> str:
        """The first place at which the model cannot be cut, with the reason; empty if it can be cut everywhere."""
        blocked = next((link for link in self.links[1:] if link.why_not), None)
        if blocked is not None:
            return f"{blocked.path} {blocked.why_not}"
        if len(self.links) > 1:
            return ""
        what = "it calls no module with parameters"
        if self.links:
            what = f"all modules with parameters that it calls lie in {self.links[0].path}"
        never = f"; {self.uncalled[0]} is never called" if self.uncalled else ""
        return (
            f"the model can be cut only between calls of modules with parameters, and {what}{never}; "
            "make its layers modules and call them, and name them in LayoutHints(blocks=...) if they are in no list"
        )


class StageCutError(ValueError):
    """The model cannot be cut into the stages that were asked for."""


def chain(trace: Trace) -> Chain:
    """The pieces of the traced model."""
    paths, block_paths = _pieces(trace)
    calls = {path: [call for call in trace.calls if call.path == path] for path in paths}
    order = sorted((path for path in paths if calls[path]), key=lambda path: calls[path][0].first)
    if not order:
        return Chain(links=(), tied=frozenset(), written={})
    lifetimes = ValueLifetimes(trace, order, calls)
    starts = lifetimes.starts
    again = [max(call.stop for call in calls[path]) for path in order]
    names = trace.parameter_names()
    costs = [0.0] * len(order)
    read: list[set[str]] = [set() for _ in order]
    for at, path in enumerate(order):
        # Parameters inside a piece belong to it even if this forward did not read them (an expert not chosen).
        read[at] |= {name for name in trace.parameters if name.startswith(path + ".")}
    for op in trace.ops:
        at = max(bisect_right(starts, op.number) - 1, 0)
        costs[at] += cost(trace, op)
        read[at] |= {names[value] for value in op.inputs if value in names}
    links = []
    for number, path in enumerate(order):
        call = calls[path][0]
        wires, why_not = lifetimes.before(number)
        asked = _branch_before(lifetimes, call.first) if number else None
        if asked is not None:
            where = asked.module or f"the model itself (class {type(trace.model).__name__})"
            why_not = (
                f"comes after a branch on data: {where} reads the value of a tensor before it, which only the "
                "stage that computes it knows; put the branch inside one block, or use torch.where"
            )
        for before in range(number):
            if again[before] > starts[number] and len(calls[order[before]]) > 1:
                why_not = f"lies between two uses of {order[before]}"
        links.append(
            ModelPiece(
                path=path,
                is_block=path in block_paths,
                cost=costs[number],
                parameters=frozenset(read[number]),
                wires=wires,
                why_not=why_not,
                same_as_argument=_same_as_argument(trace, call),
                calls=tuple(map(_given, calls[path])),
            )
        )
    seen: dict[str, int] = {}
    for link in links:
        for name in link.parameters:
            seen[name] = seen.get(name, 0) + 1
    tied = frozenset(name for name, times in seen.items() if times > 1)
    return Chain(
        links=tuple(links),
        tied=tied,
        written=_written(lifetimes),
        uncalled=_uncalled(trace, order),
        renewed=tuple(name for name, change in lifetimes.changed.items() if change.reads),
    )


def _branch_before(lifetimes: ValueLifetimes, start: int) -> ValueRead | None:
    """A read, before an operation, of a value that only one stage has, by the code between pieces."""
    for read in lifetimes.trace.value_reads:
        inside = any(read.module == path or read.module.startswith(path + ".") for path in lifetimes.order)
        own = read.learned or any(lifetimes.since[value] < read.op for value in read.values)
        if read.op <= start and own and not inside:
            return read
    return None


def _uncalled(trace: Trace, order: list[str]) -> tuple[str, ...]:
    called = {call.path for call in trace.calls}
    return tuple(
        path
        for path, module in trace.model.named_modules()
        if path not in called
        and type(module).forward is not nn.Module.forward
        and any(True for _ in module.parameters(recurse=False))
        and not any(path.startswith(piece + ".") for piece in order)
    )


def _written(lifetimes: ValueLifetimes) -> dict[str, Written]:
    """The changed buffers outside the pieces."""
    pieces = tuple(f"{path}." for path in lifetimes.order)
    return {
        name: Written(max(bisect_right(lifetimes.starts, change.writes[-1]) - 1, 0), change.own)
        for name, change in lifetimes.changed.items()
        if not name.startswith(pieces)
    }


def _pieces(trace: Trace) -> tuple[list[str], set[str]]:
    """Blocks, and the largest other modules with parameters that hold no block."""
    model = trace.model
    block_paths = {path for path, _ in blocks(model)}
    called = {call.path for call in trace.calls}
    holders = {""}
    for path in block_paths:
        parts = path.split(".")
        holders |= {".".join(parts[:n]) for n in range(len(parts))}
    while True:
        found = _largest(model, holders, block_paths, called)
        alone = [path for path in found if path not in block_paths]
        # A single module that contains the entire model is a wrapper: its parts are the pieces.
        if len(found) == 1 and alone and any(True for _ in model.get_submodule(alone[0]).children()):
            holders.add(alone[0])
            continue
        return found, block_paths


def _has_state(module: nn.Module) -> bool:
    """Whether it has parameters, or keeps running statistics."""
    if any(True for _ in module.parameters()):
        return True
    return any(isinstance(each, _BatchNorm) and each.track_running_stats for each in module.modules())


def _largest(model: nn.Module, holders: set[str], block_paths: set[str], called: set[str]) -> list[str]:
    found: list[str] = []

    def walk(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            there = f"{path}.{name}" if path else name
            if not _has_state(child):
                continue
            # Descend into a block that is never called because the model calls its layers itself.
            if there in called and (there in block_paths or there not in holders):
                found.append(there)
            else:
                walk(there, child)

    walk("", model)
    return found


def _given(call: TracedCall) -> Given:
    known = {value: leaf for leaf, value in reversed(list(enumerate(call.arguments))) if value is not None}
    return Given({n: known[value] for n, value in enumerate(call.results) if value in known}, call.learning)


def _same_as_argument(trace: Trace, call: TracedCall) -> int | None:
    if not call.bare or call.results[0] is None:
        return None
    result = trace.values[call.results[0]]
    for leaf, number in enumerate(call.arguments):
        if number is not None:
            argument = trace.values[number]
            if argument.shape == result.shape and argument.dtype == result.dtype:
                return leaf
    return None


def _partition(costs: Sequence[float], borders: Sequence[int], num: int) -> list[tuple[int, int]]:
    """Ranges between borders whose largest sum is minimal; among equals, the earliest cuts."""
    sums = [0.0]
    for value in costs:
        sums.append(sums[-1] + value)
    reach = len(borders)
    best = [[float("inf")] * reach for _ in range(num + 1)]
    cut_at = [[0] * reach for _ in range(num + 1)]
    best[0][0] = 0.0
    for stage in range(1, num + 1):
        for end in range(stage, reach):
            for begin in range(stage - 1, end):
                dearest = max(best[stage - 1][begin], sums[borders[end]] - sums[borders[begin]])
                if dearest < best[stage][end]:
                    best[stage][end], cut_at[stage][end] = dearest, begin
    found, end = [], reach - 1
    for stage in range(num, 0, -1):
        begin = cut_at[stage][end]
        found.append((borders[begin], borders[end]))
        end = begin
    return found[::-1]
