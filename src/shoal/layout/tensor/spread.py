"""Propagates a cut dimension through the operations of a trace, forwards and backwards.

Forwards, a result computed from a part is a part. Backwards, an operand that is combined with a part must be cut in the
same way: back to a projection, which then returns its output in parts, or to a parameter, of which each rank then holds
its part. The search ends in projections that sum over the cut dimension, or is refuted by an operation that needs the
full dimension.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shoal.layout.cuts import Cut
from shoal.layout.recorded import Op, Trace
from shoal.layout.tensor.dim_rules import links_of
from shoal.layout.tensor.dims import DimLinks, Place, bind
from shoal.layout.tensor.segments import STRUCTURAL, Known, NeedsSegments, Refuted, borders, refined

READS_SIZES_ONLY = {"new_zeros", "new_ones", "new_full", "new_empty"}
MOST_REFINEMENTS = 12
"""Most restarts of a search: segments are found one border at a time, and a fused projection has few."""


class Graph:
    """A trace with cached answers to frequent queries."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.values, self.ops = trace.values, trace.ops
        self.users = trace.users()
        self.outputs = {value for value in trace.output if value is not None}
        self._links: dict[int, DimLinks | None] = {}

    def links(self, op: Op) -> DimLinks | None:
        if op.number not in self._links:
            self._links[op.number] = links_of(op, self.values)
        return self._links[op.number]

    @cached_property
    def live(self) -> list[bool]:
        """For each operation: whether the output or the loss depends on it, or it writes in place."""
        needed = set(self.outputs) | {self.trace.loss}
        found = [False] * len(self.ops)
        for op in reversed(self.ops):
            if needed.intersection(op.outputs) or op.overload._schema.is_mutable:
                found[op.number] = True
                needed.update(op.inputs)
        return found

    @cached_property
    def from_batch(self) -> list[bool]:
        """For each value: whether it depends on the samples, even if only on their number."""
        found = [value.source == "batch" for value in self.values]
        for op in self.ops:
            if any(found[v] for v in op.inputs):
                for v in op.outputs:
                    found[v] = True
        return found

    def follow(self, op: Op, value: int, cut: Cut, known: Known) -> tuple[dict[int, Cut], bool]:
        """The cuts of the other operands that follow from one, and whether the operation sums over it."""
        rule = STRUCTURAL.get(op.name)
        if rule is not None:
            return rule(bind(op, self.values), value, cut, known), False
        if op.name in READS_SIZES_ONLY and value in op.inputs:
            return {}, False
        links = self.links(op)
        if links is None:
            raise Refuted("there is no rule for this operation" if op.inputs else "its size is fixed by the code")
        place = (value, cut.dim)
        groups = [group for group in links.carried if place in group]
        sums = [group for group in links.contracted if place in group]
        if not groups and not sums:
            raise Refuted("it needs the full dimension")
        self._check_units(links, place, cut)
        found: dict[int, Cut] = {}
        for group in (*groups, *sums):
            for other in group:
                scaled = self._scaled(place, other, cut)
                if found.setdefault(other[0], scaled) != scaled:
                    raise Refuted("it is combined with itself, cut along another dimension")
        return found, bool(sums)

    def _scaled(self, place: Place, other: Place, cut: Cut) -> Cut:
        size, new = (self.values[v].shape[d] for v, d in (place, other))
        if size == new:
            return Cut(other[1], cut.segments)
        if any(segment * new % size for segment in cut.segments):
            raise Refuted(f"{size} split in segments of {list(cut.segments)} do not match {new}")
        return Cut(other[1], tuple(segment * new // size for segment in cut.segments))

    def _check_units(self, links: DimLinks, place: Place, cut: Cut) -> None:
        unit = links.indivisible.get(place, 1)
        if any(segment % unit for segment in cut.segments):
            raise Refuted(f"groups of {unit} would be torn")


@dataclass(slots=True)
class Spreading:
    """Everything that is cut as a consequence of one cut."""

    cuts: dict[int, Cut] = field(default_factory=dict)
    """Value -> how it is cut."""
    sums: set[int] = field(default_factory=set)
    """Operations that sum over a cut dimension: the rows."""
    because: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Value -> the operation and the value from which its cut follows."""
    units: set[int] = field(default_factory=set)
    """Further numbers that a degree must divide: the groups of a convolution."""

    @property
    def parts(self) -> int:
        return math.gcd(*(segment for cut in self.cuts.values() for segment in cut.segments), *self.units)


class CutPropagation:
    """Propagates cuts until nothing changes."""

    def __init__(self, graph: Graph, *, sum_at: Iterable[int], uncut: Mapping[int, str] | None = None) -> None:
        """`sum_at`: operations that may sum over a cut dimension. `uncut`: values that may not be cut -> why."""
        self.graph = graph
        self.sum_at = frozenset(sum_at)
        self.uncut = dict(uncut or {})

    def run(self, seeds: dict[int, Cut]) -> Spreading:
        """Propagates from values that are cut. Restarts with finer segments where an operation requires them."""
        seeds = dict(seeds)
        for _ in range(MOST_REFINEMENTS):
            found = Spreading()
            try:
                self._spread(seeds, found)
                return found
            except NeedsSegments as wish:
                value, cut = self._origin(wish.value, wish.cut, seeds, found)
                if seeds.get(value) == cut:
                    break
                seeds[value] = cut
        raise Refuted("no segments were found that all its parts agree on")

    def _spread(self, seeds: dict[int, Cut], found: Spreading) -> None:
        queue: deque[int] = deque()
        for value, cut in seeds.items():
            self._enter(value, cut, None, found, queue)
        while queue:
            value = queue.popleft()
            producer = self.graph.values[value].producer
            users = [number for number in self.graph.users.get(value, ()) if self.graph.live[number]]
            for number in ([producer] if producer >= 0 else []) + users:
                self._through(self.graph.ops[number], value, found, queue)

    def _through(self, op: Op, value: int, found: Spreading, queue: deque[int]) -> None:
        try:
            others, sums = self.graph.follow(op, value, found.cuts[value], found.cuts)
            if sums and op.number not in self.sum_at:
                raise Refuted("it sums over the dimension")
            if sums:
                found.sums.add(op.number)
            links = None if op.name in STRUCTURAL else self.graph.links(op)
            if links is not None and (unit := links.indivisible.get((value, found.cuts[value].dim), 1)) >= 1:
                found.units.update(segment // unit for segment in found.cuts[value].segments)
            for other, cut in others.items():
                self._enter(other, cut, (op.number, value), found, queue)
        except Refuted as refusal:
            raise Refuted(f"{op.name} in {op.module or 'the model'}: {refusal}") from None

    def _enter(
        self, value: int, cut: Cut, because: tuple[int, int] | None, found: Spreading, queue: deque[int]
    ) -> None:
        before = found.cuts.get(value)
        if before == cut:
            return
        if before is not None:
            finer = refined(before.segments, set(borders(cut.segments)))
            if before.dim == cut.dim and finer != before.segments:
                raise NeedsSegments(value, Cut(cut.dim, finer))
            raise Refuted(f"it would have to be cut as {_text(before)} and as {_text(cut)}")
        self._may_be_cut(value, cut)
        found.cuts[value] = cut
        if because is not None:
            found.because[value] = because
        queue.append(value)

    def _may_be_cut(self, value: int, cut: Cut) -> None:
        known = self.graph.values[value]
        if known.source == "batch":
            raise Refuted(f"it is combined with the batch's {known.name!r}, which is not split")
        if known.source == "constant":
            raise Refuted("it is combined with a constant tensor of the code, whose size is fixed")
        if value in self.graph.outputs:
            raise Refuted("it reaches the model's output")
        if value in self.uncut:
            raise Refuted(f"it is combined with {known.name or 'a value'}, which {self.uncut[value]}")
        if math.gcd(*cut.segments) == 1:
            raise Refuted(f"{list(cut.segments)} cannot be split evenly among two or more ranks")

    def _origin(self, value: int, cut: Cut, seeds: dict[int, Cut], found: Spreading) -> tuple[int, Cut]:
        """Where a finer cut must begin: the nearest projection on the path by which the cut was found."""
        while value not in seeds and value in found.because:
            number, source = found.because[value]
            if number in self.sum_at and value in self.graph.ops[number].outputs:
                break
            others, _ = self.graph.follow(self.graph.ops[number], value, cut, {})
            if source not in others:
                raise Refuted(f"{self.graph.ops[number].name} cannot pass on finer segments")
            value, cut = source, others[source]
        return value, cut


def _text(cut: Cut) -> str:
    return f"dimension {cut.dim} in segments of {list(cut.segments)}"
