"""The same kind of strategy for another number of ranks: which sizes of its axes would fill a given world."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import log2, prod

from shoal.common.numbers import ordered_products
from shoal.strategy.expression import Strategy
from shoal.strategy.terms import dp, ps
from shoal.strategy.terms.arguments import LARGEST_SIZE

MOST_CHANGED_AXES = 3
"""Axes that are resized at once. With three free axes any world can be filled, and the choices stay few."""

MOST_PROPOSALS = 60


def strategies_for_world(strategy: Strategy, world: int) -> list[Strategy]:
    """Strategies with the same axes that need exactly `world` ranks, the least changed first."""
    if not 1 <= world <= LARGEST_SIZE:
        return []
    found = {candidate: None for candidate in _proposals(strategy, world) if candidate.world == world}
    return list(found)


def _proposals(strategy: Strategy, world: int) -> Iterator[Strategy]:
    workers = world - strategy.servers
    if workers >= 1:
        for sizes in _sizes([axis.size for axis in strategy.axes], workers):
            yield _resized(strategy, sizes)
        if not strategy.dp_levels and workers % strategy.workers == 0:
            yield Strategy(dp(workers // strategy.workers), *strategy.terms)
    if strategy.servers:
        yield from _proposals(_without_servers(strategy), world)


def _sizes(sizes: list[int], workers: int) -> list[tuple[int, ...]]:
    """Sizes of the axes whose product is the number of workers, the least changed first."""
    found: dict[tuple[int, ...], float] = {}
    for many in range(1, min(MOST_CHANGED_AXES, len(sizes)) + 1):
        for places in combinations(range(len(sizes)), many):
            fixed = prod(size for place, size in enumerate(sizes) if place not in places)
            for parts in ordered_products(workers // fixed, many) if workers % fixed == 0 else ():
                new = list(sizes)
                for place, part in zip(places, parts, strict=True):
                    new[place] = part
                found[tuple(new)] = sum(abs(log2(after / before)) for before, after in zip(sizes, new, strict=True))
        if len(found) >= MOST_PROPOSALS:
            break  # Changing more axes would only lead further away.
    if sizes:
        found.setdefault((workers, *[1] * (len(sizes) - 1)), float("inf"))
    return sorted(found, key=found.__getitem__)[:MOST_PROPOSALS]


def _resized(strategy: Strategy, sizes: tuple[int, ...]) -> Strategy:
    axes = [axis.term.replace(n=size) for axis, size in zip(strategy.axes, sizes, strict=True)]
    return Strategy(*axes, *strategy.modifiers)


def _without_servers(strategy: Strategy) -> Strategy:
    """Servers move onto the workers, as many as find room there."""
    terms = []
    for term in strategy.terms:
        if isinstance(term, dp) and isinstance(term.via, ps):
            term = term.replace(via=ps(min(term.via.shards, term.n), colocated=True))
        terms.append(term)
    return Strategy(*terms)
