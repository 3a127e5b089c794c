"""Islands: the ranks that step together, where a level of dp is loose: sync other than bsp, or bsp with backups."""

from __future__ import annotations

from itertools import product
from typing import Any

from shoal.strategy.expression import Strategy
from shoal.strategy.seats import seats_of
from shoal.strategy.terms.axes import dp
from shoal.strategy.terms.sync import bsp


def is_loose(term: Any) -> bool:
    """Whether it is a level of dp whose replicas do not wait for all others in every step."""
    return isinstance(term, dp) and (not isinstance(term.sync, bsp) or term.sync.backup > 0)


def islands(strategy: Strategy) -> list[tuple[int, ...]]:
    """The ranks of each island, the first island first; one island of all ranks where no level is loose."""
    axes = strategy.axes
    loose = [is_loose(axis.term) for axis in axes]
    found: dict[tuple[int, ...], list[int]] = {}
    # The last axis varies fastest from rank to rank.
    for rank, place in enumerate(product(*(range(axis.size) for axis in axes))):
        found.setdefault(tuple(at for at, apart in zip(place, loose, strict=True) if apart), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def losable(strategy: Strategy) -> list[tuple[int, ...]]:
    """Islands of which any but the first may be killed. Those that serve a shard of the model are one with it."""
    found, seats = islands(strategy), seats_of(strategy)
    if sum(map(is_loose, strategy.dp_levels)) > 1:  # The rounds of the inner level are not those of all.
        return [tuple(rank for island in found for rank in island)]
    if seats is None or not seats.colocated or len(found) == 1:
        return found
    return [tuple(rank for island in found[: seats.shards] for rank in island), *found[seats.shards :]]
