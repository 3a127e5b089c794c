"""What ties islands together: when a loose level of dp exchanges, and what one rank sends then.

An exchange begins with two numbers, what the island learned from and whether it was asked to stop; among neighbours
they travel with the models, and nothing is summed over all. What follows is up to the rule (`SyncTerm.sends`): an
average takes one all-reduce for each of this rank's slices of the parameters, and one for all its floating-point
buffers. The ledger's prediction adds an exchange to the step that it follows; an estimate shares it among the steps of
a period.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.estimate.held import Held
from shoal.estimate.traffic import NUMBER_BYTES, Call, ShardTable
from shoal.strategy import Strategy, bsp
from shoal.strategy.terms.sync import SyncTerm, Turn

NUMBERS = 2


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
        raise ValueError(f"{strategy}: when replicas exchange under sync={sync} is not known in advance, so its step "
                         "cannot be estimated; that of bsp(), local(h), diloco(h), bmuf(h), elastic(h, rho) and "
                         "gossip(graph) can")  # fmt: skip
    return sync.period


def outer_calls(held: Held, table: ShardTable, *, round: int = 0) -> Iterator[Call]:
    """Of one exchange, the first being round 0; nothing where there is one island."""
    group = held.placing.islands.group
    if group.ranks == 1:
        return
    slices = [buffer.padded_bytes // buffer.sharding.ranks for buffer in table.buffers]
    floats = held.float_numbers() * NUMBER_BYTES * (2 if held.shapes.complex_floats else 1)
    sync = loose_sync(held.strategy)
    assert sync is not None
    turn = Turn(round, held.placing.islands.index, group.ranks)
    sums = [] if sync.neighbours else [("all_reduce", NUMBERS * NUMBER_BYTES)]
    for kind, size in (*sums, *sync.sends(slices, floats, turn)):
        yield group.axis, "outer", kind, size, group.ranks
