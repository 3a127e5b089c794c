"""The tensors that cross a cut between two pipeline stages, derived from a trace.

A value belongs to a stage if it depends on a parameter, is produced inside a piece, or is computed from such a value or
from a buffer that such values change, including by a write into its memory. All other values (masks, rotary tables) are
recomputed by every stage with the model's own code. A value that belongs to an earlier stage and is still needed must
be sent, so both stages must be able to find it: as an argument of the piece after the cut, or as the result of a piece
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from torch.utils._pytree import tree_leaves

from shoal.layout.recorded import Op, Ref, Trace, TracedCall

Place = tuple[int, int, int]
"""(piece, index of its call, index of the flattened result)"""

SHAPE_ALONE = frozenset(
    {
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_empty_strided",
    }
)
"""Operations that read the shape of a tensor but not its values."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor that crosses a cut."""

    results: tuple[Place, ...]
    """The results of pieces before the cut that it is."""
    arguments: tuple[int, ...]
    """The flattened arguments of the piece after the cut that it is."""
    beside: bool
    """Whether code outside that piece uses it too, after the cut."""
    learns: bool
    """Whether it receives a gradient from the loss."""
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class BufferChange:
    """The operations of a forward that read and write a buffer which it changes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    own: bool
    """Whether the change depends on values of one stage; otherwise every stage that reaches it can make it."""

    def is_cut_at(self, start: int) -> bool:
        """Whether a stage would see a different value than one process, with a cut before an operation. A stage runs
        the model's code up to its end, so it misses later writes."""
        before, behind = any(op < start for op in self.writes), any(op >= start for op in self.writes)
        early, late = any(op < start for op in self.reads), any(op >= start for op in self.reads)
        return (behind and early) or (self.own and before and (behind or late))


class ValueLifetimes:
    """From which operation on a value belongs to a stage, and until which operation it is needed."""

    def __init__(self, trace: Trace, order: Sequence[str], calls: dict[str, list[TracedCall]]) -> None:
        self.trace, self.order, self.calls = trace, order, calls
        self.starts = [calls[path][0].first for path in order]
        self._in_memory: dict[int, list[int]] = {}
        for value in trace.values:
            if value.storage:
                self._in_memory.setdefault(value.storage, []).append(value.number)
        self.since = self._since(frozenset())
        self.changed = _changed_buffers(trace, self.since)
        # Values read from a buffer that only one stage can change belong to that stage too.
        own = frozenset(trace.buffers[name] for name, change in self.changed.items() if change.own)
        if own:
            self.since = self._since(own)
            self.changed = _changed_buffers(trace, self.since)
        self.last_use = {value: max(ops) for value, ops in trace.users().items()}
        for read in trace.value_reads:
            for each in read.values:
                self.last_use[each] = max(self.last_use.get(each, -1), read.op - 1)
        for number in [*trace.output, trace.loss]:
            if number is not None:
                self.last_use[number] = len(trace.ops)

    def _since(self, buffers: frozenset[int]) -> list[float]:
        """For each value the operation from which on it belongs to a stage; infinity if every stage can compute it.
        `buffers` belong to a stage from the start."""
        trace = self.trace
        since = [-1.0 if v.source == "parameter" or v.number in buffers else inf for v in trace.values]
        inside = [False] * len(trace.ops)
        for path in self.order:
            for call in self.calls[path]:
                inside[call.first : call.stop] = [True] * (call.stop - call.first)
        for op in trace.ops:
            depends = op.name not in SHAPE_ALONE and any(since[each] < op.number for each in op.inputs)
            if not (inside[op.number] or depends):
                continue
            touched = list(op.outputs)
            for written in written_by(op):
                if trace.values[written].storage:
                    touched += [v for v in self._in_memory[trace.values[written].storage] if v < op.outputs[0]]
            for number in touched:
                since[number] = min(since[number], op.number)
        return since

    def before(self, number: int) -> tuple[tuple[Wire, ...], str]:
        """The tensors that cross the cut before a piece, or why it cannot be cut there."""
        start = self.starts[number]
        if not number:
            return (), ""
        trace, arguments = self.trace, self.calls[self.order[number]][0].arguments
        stop = self.calls[self.order[number]][0].stop
        given: dict[int, list[Place]] = {}
        made: set[int] = set()
        for piece in range(number):
            for which, call in enumerate(self.calls[self.order[piece]]):
                for leaf, result in enumerate(call.results):
                    if result is not None and call.stop <= start:
                        given.setdefault(result, []).append((piece, which, leaf))
                        made |= set() if result in call.arguments else {result}
        wires = []
        for value in trace.values:
            own = value.source == "op" and value.producer < start and self.since[value.number] < start
            last = self.last_use.get(value.number, -1)
            if not (own or value.number in made) or not (value.number in arguments or last >= start):
                continue
            places = tuple(given.get(value.number, ()))
            leaves = tuple(leaf for leaf, argument in enumerate(arguments) if argument == value.number)
            if not (places or leaves):
                maker = trace.ops[value.producer]
                where = maker.module or type(trace.model).__name__
                return (), f"needs more than its arguments: a result of {maker.name} in {where} is also used after it"
            same_memory = self._in_memory.get(value.storage, [value.number])
            beside = any(self.last_use.get(each, -1) >= stop for each in same_memory)
            wires.append(Wire(places, leaves, beside, value.reached, value.shape, value.dtype.itemsize))
        for name, change in self.changed.items():
            if change.is_cut_at(start):
                return (), f"lies between two uses of the buffer {name}, which the forward changes"
        return tuple(wires), ""


def _changed_buffers(trace: Trace, since: list[float]) -> dict[str, BufferChange]:
    found = {}
    users = trace.users()
    for name, value in trace.buffers.items():
        storage = trace.values[value].storage
        same = {v.number for v in trace.values if v.number == value or (storage and v.storage == storage)}
        writes = {op.number for op in trace.ops if not same.isdisjoint(written_by(op))}
        behind = trace.buffers_behind.get(name, value)
        if behind != value and trace.values[behind].source == "op":
            writes.add(trace.values[behind].producer)
        if writes:
            reads = {op for each in same for op in users.get(each, ())} - writes
            own = any(since[out] <= op for op in writes for out in trace.ops[op].outputs)
            found[name] = BufferChange(tuple(sorted(reads)), tuple(sorted(writes)), own)
    return found


def written_by(op: Op) -> list[int]:
    """Values into whose memory an operation writes."""
    schema = op.overload._schema
    if "batch_norm" in op.name:
        # The schema does not declare that running statistics are written.
        return [leaf.value for leaf in tree_leaves(op.args[3:5]) if isinstance(leaf, Ref)]
    if not schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name)
            found += [leaf.value for leaf in tree_leaves(given) if isinstance(leaf, Ref)]
    return found
