"""What a worker sends to parameter servers in a step: its gradients, part by part, and one short message."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.estimate.held import Held
from shoal.estimate.traffic import NUMBER_BYTES, Call, ShardTable
from shoal.strategy.seats import HEADER_NUMBERS, parts_of


def server_calls(held: Held, table: ShardTable) -> Iterator[Call]:
    """Of one ticket, or one step; nothing where there are no servers. What a worker serves to itself is not sent."""
    seats = held.placing.seats
    if seats is None:
        return
    position, ranks = held.rank % seats.positions, held.strategy.world
    # Stage 3 lays blocks out from the last to the first, and the root behind them; the table has the reverse.
    buffers = table.buffers if table.zero < 3 else table.buffers[::-1]
    slices = [(b.padded_bytes // b.sharding.ranks // b.itemsize, b.itemsize) for b in buffers]
    for shard, parts in enumerate(parts_of(slices, seats.shards)):
        if seats.server(shard, position) != held.rank:
            for part in parts:
                yield "ps", "gradient", "send", (part.stop - part.start) * slices[part.bucket][1], ranks
    if position == 0 and seats.servers[0] != held.rank:
        numbers = HEADER_NUMBERS + 4 * seats.replicas + table.num_parameters
        yield "ps", "optimizer", "send", numbers * NUMBER_BYTES, ranks
