"""Islands: the ranks that step together, where a level of dp is loose (sync other than bsp)."""

from __future__ import annotations

from itertools import product

from shoal.strategy.expression import Strategy
from shoal.strategy.terms.axes import dp
from shoal.strategy.terms.sync import bsp


def islands(strategy: Strategy) -> list[tuple[int, ...]]:
    """The ranks of each island, the first island first; one island of all ranks where no level is loose."""
    axes = strategy.axes
    loose = [isinstance(axis.term, dp) and not isinstance(axis.term.sync, bsp) for axis in axes]
    found: dict[tuple[int, ...], list[int]] = {}
    # The last axis varies fastest from rank to rank.
    for rank, place in enumerate(product(*(range(axis.size) for axis in axes))):
        found.setdefault(tuple(at for at, is_loose in zip(place, loose, strict=True) if is_loose), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]
