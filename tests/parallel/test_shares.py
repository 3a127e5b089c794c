"""Shares of the data among islands of different speeds: every share once, whoever is slow or killed."""

from __future__ import annotations

import heapq
from random import Random
from typing import Any

from shoal.parallel.sync.shares import WAIT, Shares


def spread(
    speeds: list[float], limit: int, *, killed: tuple[int, float] | None = None
) -> tuple[Shares, list[Any], float]:
    """The shares that islands computed, which need so many seconds for one; an island is killed at a time."""
    shares, computed, waiting, time_s = Shares(len(speeds), 0), list[Any](), list[int](), 0.0
    shares.until(limit, stop=False)
    events = [(0.0, island) for island in range(len(speeds))]

    def take(island: int) -> None:
        found = shares.take(island, time_s)
        if found is WAIT:
            waiting.append(island)
        elif found is not None:
            computed.append((island, found))
            heapq.heappush(events, (time_s + speeds[island], island))

    while events:
        time_s, island = heapq.heappop(events)
        if killed is not None and island == killed[0] and time_s >= killed[1]:
            if island in shares.outstanding:
                computed.remove((island, shares.outstanding[island]))
            shares.lose(island)
        else:
            shares.done(island, time_s)
            take(island)
        again, waiting[:] = list(waiting), []
        for each in again:
            take(each)
    return shares, computed, time_s


def test_islands_of_equal_speed_compute_their_own() -> None:
    shares, computed, time_s = spread([1.0, 1.1, 1.0, 0.9], 10)
    assert all(island == share for island, (_, share) in computed)
    assert shares.taken_over == 0
    assert time_s < 11.1


def test_a_slow_island_delays_the_others_by_one_share() -> None:
    shares, computed, time_s = spread([1.0, 1.0, 3.0, 1.0], 30)
    assert sum(island == 2 for island, _ in computed) == 13
    assert shares.taken_over == 17
    assert time_s <= 30 * 4 / (3 + 1 / 3) + 3.0


def test_every_share_is_computed_once_in_random_runs() -> None:
    for seed in range(500):
        random = Random(seed)
        islands, limit = random.randint(1, 6), random.randint(1, 12)
        killed = (random.randrange(1, islands), random.uniform(0, 10)) if islands > 1 and seed % 2 else None
        _, computed, _ = spread([random.uniform(0.1, 3) for _ in range(islands)], limit, killed=killed)
        wanted = [(step, share) for step in range(limit) for share in range(islands)]
        assert sorted(ticket for _, ticket in computed) == wanted, seed


def test_a_stop_ends_all_after_the_last_step_that_was_begun() -> None:
    shares = Shares(2, 0)
    shares.until(10, stop=False)
    assert shares.take(0, 0.0) == (0, 0)
    shares.done(0, 1.0)
    shares.until(10, stop=True)
    assert shares.take(0, 1.0) is WAIT
    assert shares.take(1, 1.0) == (0, 1)
    shares.done(1, 2.0)
    assert shares.take(1, 2.0) is None
    assert (shares.limit, shares.stopping) == (1, True)
