"""What ties islands together: when a loose level of dp exchanges, and what one rank sends then.

What is sent after a step is a function of the clock (`SyncTerm.calls`): most rules exchange every `period` steps, and
begin with a few numbers; an average takes one all-reduce for each of this rank's slices of the parameters, and one for
all its floating-point buffers. The ledger's prediction adds these calls to the step that they follow; an estimate
shares those of a period among its steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from shoal.comm.wire import sent
from shoal.estimate.held import Held
from shoal.estimate.shard_table import OfTerm, compressed_transfers
from shoal.estimate.traffic import NUMBER_BYTES, Buffer, Call, ShardTable
from shoal.strategy import Strategy, bsp, none
from shoal.strategy.terms.sync import Sendable, Served, SyncTerm

MANY, PART_BYTES = 64, 1 << 24
"""Parameters of a model whose names are not known, and the bytes of each."""
SETTLED = 10**6
"""Periods after which the exchanges of a rule are taken to be those of its long run."""


def loose_sync(strategy: Strategy) -> SyncTerm | None:
    """The rule of the level whose replicas step by themselves; None where all step together."""
    return next((level.sync for level in strategy.dp_levels if not isinstance(level.sync, bsp)), None)


def period(strategy: Strategy) -> int:
    """Steps from one exchange of islands to the next; 1 where all ranks step together. Raises ValueError for a rule
    whose exchanges are not known in advance."""
    sync = loose_sync(strategy)
    if sync is None:
        return 1
    if sync.period is None:
        raise ValueError(
            f"{strategy}: when replicas exchange under sync={sync} is not known in advance, so its step "
            "cannot be estimated; that of bsp(), local(h), diloco(h), bmuf(h), elastic(h, rho) and "
            "gossip(graph) can"
        )
    return sync.period


def near_sync(strategy: Strategy) -> SyncTerm | None:
    """The rule of the inner one of two loose levels."""
    loose = [level.sync for level in strategy.dp_levels if not isinstance(level.sync, bsp)]
    return loose[1] if len(loose) > 1 else None


def outer_calls(
    held: Held, table: ShardTable, clock: int, *, asked: int = 1, moved: Sequence[tuple[str, int]] | None = None
) -> Iterator[Call]:
    """What follows the update of step `clock` (from 0); nothing where there is one island. `asked`: how often others
    asked this one, where they do so at any time; `moved`: what it sent and took, where that is decided by timing."""
    group = held.placing.islands.group
    if group.ranks == 1:
        return
    sync = loose_sync(held.strategy)
    if sync is None or isinstance(sync, Served):
        return
    sendable = _sent(held, table)._replace(asked=asked, moved=moved)
    near, inner = held.placing.near, near_sync(held.strategy)
    if near is not None and inner is not None and near.ranks > 1:
        for kind, size in inner.calls(clock, sendable._replace(island=near.index, islands=near.ranks)):
            yield near.group.axis, "outer", kind, size, near.ranks
    for kind, size in sync.calls(clock, sendable):
        yield group.axis, "outer", kind, size, group.ranks
    for size in sync.island_calls(clock, sendable.names):
        yield held.placing.norm.group.axis, "outer", "all_reduce", size, held.placing.norm.ranks


def period_calls(held: Held, table: ShardTable) -> Iterator[Call]:
    """Of all steps of one period, long after the start."""
    sync, steps = loose_sync(held.strategy), period(held.strategy)
    near = near_sync(held.strategy)
    moments = set(() if sync is None else sync.moments)
    moments |= set() if near is None else set(range(near.period or steps, steps + 1, near.period or steps))
    for step in sorted(moments):
        yield from outer_calls(held, table, SETTLED * steps + step - 1)


def exchange_volume(sync: SyncTerm, islands: int) -> float:
    """Bytes that a rank sends in one period, relative to one all-reduce of all its parameters: for plans, which know
    sizes and no names. A model of many equal parameters stands for any."""
    if sync.period is None:
        raise ValueError(f"when replicas exchange under sync={sync} is not known in advance")
    held = Sendable(
        names=[str(number) for number in range(MANY)],
        slices=[MANY * PART_BYTES],
        buffers=0,
        exchanged=lambda names, number: [("all_reduce", len(names) * PART_BYTES)],
        island=0,
        islands=islands,
    )
    clocks = [SETTLED * sync.period + step - 1 for step in sync.moments]
    calls = [call for clock in clocks for call in sync.calls(clock, held)]
    dense = sent("all_reduce", payload_bytes=MANY * PART_BYTES, ranks=islands).bytes
    return sum(sent(kind, payload_bytes=size, ranks=islands).bytes for kind, size in calls) / dense


def hidden_steps(sync: SyncTerm, period: int) -> int:
    """Steps that go on while an exchange is under way; 0 where islands wait for it."""
    given = sync.values()
    return period if given.get("eager") else int(given.get("overlap", 0))


def _sent(held: Held, table: ShardTable) -> Sendable:
    floats = held.float_numbers() * NUMBER_BYTES * (2 if held.shapes.complex_floats else 1)

    level = next(level for level in held.strategy.dp_levels if not isinstance(level.sync, bsp))
    islands = held.placing.islands

    def exchanged(names: Collection[str], number: int) -> list[tuple[str, int]]:
        chosen, found = set(names), list[tuple[str, int]]()
        for buffer in table.buffers:
            size = buffer.padded_bytes // buffer.itemsize // buffer.sharding.ranks
            part = (buffer.shard * size, (buffer.shard + 1) * size)
            if isinstance(level.compress, none):
                elements = sum(_overlap(range_, part) for name, range_ in _stretches(buffer) if name in chosen)
                found += [("all_reduce", max(4, buffer.itemsize) * elements)] if elements else []
            else:
                slots = [slot for slot in buffer.slots if slot.name in chosen]
                found += compressed_transfers(
                    OfTerm(level.compress),
                    slots,
                    part,
                    max(4, buffer.itemsize),
                    ranks=islands.ranks,
                    rank=islands.index,
                    step=number,
                )
        return found

    return Sendable(
        names=[each.name for each in held.shapes.parameters if each.trains],
        slices=[buffer.padded_bytes // buffer.sharding.ranks for buffer in table.buffers],
        buffers=floats,
        exchanged=exchanged,
        island=held.placing.islands.index,
        islands=held.placing.islands.ranks,
        moments=held.moments,
    )


def _stretches(buffer: Buffer) -> Iterator[tuple[str, tuple[int, int]]]:
    """The parameters of a buffer, each with the padding that follows it."""
    ends = [*(slot.start for slot in buffer.slots[1:]), buffer.padded_bytes // buffer.itemsize]
    for slot, end in zip(buffer.slots, ends, strict=True):
        yield slot.name, (slot.start, end)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
