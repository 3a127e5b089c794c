"""Rules about schemes that leave replicas different: graphs of gossip, and the pull of an elastic centre."""

from __future__ import annotations

from typing import Any

from shoal.strategy.graphs import two_colours
from shoal.strategy.legality.levels import composites_around, is_composite
from shoal.strategy.legality.rule import Breach, Case, RuleTable
from shoal.strategy.terms.axes import dp
from shoal.strategy.terms.sync import bsp

rule = RuleTable()


@rule(dp, why="A torus has two sides of at least two; a prime number of replicas makes only a ring.")
def a_torus_has_two_sides(case: Case, index: int, level: dp) -> Breach | None:
    if _argument(level, "graph") != "torus" or is_composite(level.n):
        return None
    return Breach(
        level,
        f"{level.n} is no product of two sides of at least two, so its replicas cannot stand on a torus",
        lambda: [
            case.changed(index, sync=level.sync.replace(graph="ring")),
            *case.resized(index, composites_around(level.n)),
        ],
    )


@rule(dp, why="Asynchronous gossip can deadlock unless its graph is bipartite (AD-PSGD).")
def async_gossip_needs_a_bipartite_graph(case: Case, index: int, level: dp) -> Breach | None:
    graph = _argument(level, "graph")
    if graph is None or _argument(level, "mode") != "async" or two_colours(graph, level.n) is not None:
        return None
    even = sorted({level.n - level.n % 2, level.n + level.n % 2} - {0})
    return Breach(
        level,
        f"a {graph} graph of {level.n} is not bipartite, so asynchronous pairwise averaging can deadlock (AD-PSGD)",
        lambda: [
            case.changed(index, sync=level.sync.replace(mode="sync")),
            *[case.changed(index, n=size, sync=level.sync.replace(graph="ring")) for size in even],
        ],
    )


@rule(dp, why="A member of a gossip sends its model, so all of its own replicas must hold the same one.")
def gossip_members_agree(case: Case, index: int, level: dp) -> Breach | None:
    outside = any(other.sync.neighbours for place, other in case.levels() if place < index)
    if not outside or isinstance(level.sync, bsp):
        return None
    return Breach(
        level,
        f"replicas under {level.sync} hold different models, and the gossip outside wants one from each member",
        lambda: [case.changed(index, sync=bsp(), via=None)],
    )


@rule(dp, why="An outer momentum takes the change of a round, which all members of the round must have ended.")
def outer_momentum_is_synchronous(case: Case, index: int, level: dp) -> Breach | None:
    values = level.sync.values()
    plain = {"momentum": 0.0, "lr": 1.0, "pull": 1.0}
    if "graph" not in values or values["mode"] == "sync" or all(values[name] == plain[name] for name in plain):
        return None
    return Breach(
        level,
        f'the outer optimiser of gossip needs mode="sync": under "{values["mode"]}" there is no mean to step from',
        lambda: [
            case.changed(index, sync=level.sync.replace(mode="sync")),
            case.changed(index, sync=level.sync.replace(**plain)),
        ],
    )


@rule(dp, why="All replicas pull at the centre at once; together they must not pull it beyond their mean (EASGD).")
def a_centre_stays_between_its_replicas(case: Case, index: int, level: dp) -> Breach | None:
    rho = _argument(level, "rho")
    if rho is None or _argument(level, "mode") != "sync" or rho * level.n <= 1.0:
        return None
    return Breach(
        level,
        f"{level.n} replicas pull the centre by {rho:g} of their distance each, {rho * level.n:g} together; at most 1 "
        "keeps it between them",
        lambda: [
            case.changed(index, sync=level.sync.replace(rho=0.9 / level.n)),
            case.changed(index, sync=level.sync.replace(mode="async")),
        ],
    )


def _argument(level: dp, name: str) -> Any:
    """An argument of the level's sync; None where it has none of this name."""
    return level.sync.values().get(name)
