"""What a worker sends to parameter servers in a step: its gradients, part by part, and one short message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.comm.compress.traffic import pays_to_push
from shoal.estimate.held import Held
from shoal.estimate.shard_table import LONG_AFTER, compressible
from shoal.estimate.traffic import NUMBER_BYTES, Call, PredictedSlot, ShardTable
from shoal.strategy.seats import HEADER_NUMBERS, parts_of
from shoal.strategy.terms import dp
from shoal.strategy.terms.compress import CompressTerm, none


class PushedPart(NamedTuple):
    """A range of a buffer that one server gets."""

    shard: int
    start: int
    stop: int
    itemsize: int
    slots: Sequence[PredictedSlot]

    def compressed(self, term: CompressTerm) -> Iterator[tuple[PredictedSlot, int, int]]:
        """What of it is compressed: elements [start, stop) of parameters."""
        working = max(self.itemsize, 4)
        for slot in self.slots:
            first, last = max(slot.start, self.start) - slot.start, min(slot.stop, self.stop) - slot.start
            if first >= last:
                continue
            body = compressible(
                lambda shape: pays_to_push(term, shape, working), term.whole_rows, slot.shape, first, last
            )
            if body is not None:
                yield slot, body[0], body[1]

    def pushed_bytes(self, term: CompressTerm, step: int) -> int:
        """Of its message in a worker's push of this number."""
        if isinstance(term, none):
            return (self.stop - self.start) * self.itemsize
        within = ((max(s.start, self.start), min(s.stop, self.stop)) for s in self.slots)
        total = sum(max(0, stop - start) for start, stop in within) * self.itemsize
        for _, start, stop in self.compressed(term):
            sent = term.pushed_bytes(stop - start, max(self.itemsize, 4), step=step)
            total += (sent or 0) - (stop - start) * self.itemsize
        return total


def pushed_parts(held: Held, table: ShardTable) -> Iterator[PushedPart]:
    """The parts of this rank's gradient, shard by shard."""
    assert held.placing.seats is not None
    # Stage 3 lays blocks out from the last to the first, and the root behind them; the table has the reverse.
    buffers = table.buffers if table.zero < 3 else table.buffers[::-1]
    slices = [(b.padded_bytes // b.sharding.ranks // b.itemsize, b.itemsize) for b in buffers]
    # An optimiser of full parameters has them full at a server.
    starts = [[slot.start for slot in b.slots] for b in buffers] if held.shapes.full_parameters else None
    for shard, parts in enumerate(parts_of(slices, held.placing.seats.shards, starts=starts)):
        for part in parts:
            elements, itemsize = slices[part.bucket]
            low = buffers[part.bucket].shard * elements
            yield PushedPart(shard, low + part.start, low + part.stop, itemsize, buffers[part.bucket].slots)


def push_compressor(held: Held) -> CompressTerm:
    """How workers compress what they push."""
    term = held.strategy.axes[0].term
    assert isinstance(term, dp)
    return term.compress


def server_calls(held: Held, table: ShardTable, *, step: int = LONG_AFTER) -> Iterator[Call]:
    """Of one ticket, or one step; nothing where there are no servers. What a worker serves to itself is not sent.
    `step`: the number of the push, where its size depends on that."""
    seats = held.placing.seats
    if seats is None:
        return
    position, ranks = held.rank % seats.positions, held.strategy.world
    for part in pushed_parts(held, table):
        if seats.server(part.shard, position) != held.rank:
            yield "ps", "gradient", "send", part.pushed_bytes(push_compressor(held), step), ranks
    if position == 0 and seats.servers[0] != held.rank:
        numbers = HEADER_NUMBERS + 4 * seats.replicas + table.num_parameters
        yield "ps", "optimizer", "send", numbers * NUMBER_BYTES, ranks
