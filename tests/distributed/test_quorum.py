"""Rounds with a quorum, and islands that take shares of the data as they are free: simulations, replays, faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from distributed.test_islands import PROVE, limit
from distributed.test_lost_islands import lose

Ranks = Callable[..., list[Any]]
REPLAYED = "distributed.gossip_targets:prove_async"
EQUAL = [
    (
        "plain",
        "dp(4, sync=diloco(4, quorum=4, fragments=2, overlap=1, blend=0.5))",
        "dp(4, sync=diloco(4, fragments=2, overlap=1, blend=0.5))",
    ),
    (
        "uneven",
        'dp(4, sync=diloco(2, quorum=4, merge="radial", weight="tokens2/steps"))',
        'dp(4, sync=diloco(2, merge="radial", weight="tokens2/steps"))',
    ),
]
BY_TIMING = [
    ("plain", "dp(4, sync=diloco(4, quorum=3))"),
    ("ignored", "dp(4, sync=diloco(2, quorum=3))"),
    ("uneven", 'dp(4, sync=diloco(4, quorum=2, fragments=2, overlap=1, blend=0.5, weight="tokens2/steps"))'),
    ("momentum", 'dp(4, sync=diloco(2, quorum=3, merge="radial", grace=0.0))'),
    ("plain", 'dp(4, sync=gossip("ring", "async"))'),
]


def test_a_quorum_of_all_is_the_scheme_without_one(ranks: Ranks) -> None:
    for case, rows in zip(EQUAL, zip(*ranks(PROVE, {"cases": EQUAL, "steps": 9}, ranks=4), strict=True), strict=True):
        assert max(row["difference"] for row in rows if "gradient" not in row["where"]) < limit(case[:2]), case
        assert [row["ledger"] for row in rows] == [[]] * 4, case


def test_a_run_by_tickets_is_its_own_log_replayed(ranks: Ranks) -> None:
    asked = {"cases": BY_TIMING, "steps": 16, "slow": 2, "tickets": True}
    for case, rows in zip(BY_TIMING, zip(*ranks(REPLAYED, asked, ranks=4), strict=True), strict=True):
        assert sum(row["compared"] for row in rows) > 0
        assert max(row["difference"] for row in rows) < 1e-10, case
        assert [row["ledger"] for row in rows] == [[]] * 4, case
        updates = sorted(tuple(row[3:]) for each in rows for row in each["log"] if row[0] == "update")
        assert updates == [(step, share) for step in range(16) for share in range(4)], case
        assert rows[0]["taken_over"] > 0


def test_an_anchor_of_a_round_before_is_found(ranks: Ranks) -> None:
    asked = {"cases": [("plain", "dp(4, sync=diloco(2, quorum=2, grace=0.0))")], "steps": 16, "tickets": True}
    rows = ranks("distributed.quorum_targets:one_version_behind", asked, ranks=4)
    assert max(row["difference"] for [row] in rows) > 1e-6


def test_an_island_that_was_away_and_kept_its_learning_rate_is_found(ranks: Ranks) -> None:
    case = ("rates", "dp(4, sync=diloco(4, quorum=3))")
    asked = {"cases": [case], "steps": 16, "slow": 2, "tickets": True}
    rows = ranks("distributed.quorum_targets:old_learning_rate", asked, ranks=4)
    assert max(row["difference"] for [row] in rows) > 1e-6
    assert max(row["difference"] for [row] in ranks(REPLAYED, asked, ranks=4)) < 1e-10


def test_a_run_resumed_with_moves_that_are_not_taken_yet_is_the_same_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    strategy = "dp(2, sync=diloco(4, quorum=2, fragments=2, overlap=1, blend=0.5))"
    asked = {"job": "plain", "strategy": strategy, "at": 6, "steps": 11, "folder": str(tmp_path)}
    for row in ranks("distributed.island_targets:resumed", asked, ranks=2):
        assert row["more"] == row["then"]
        assert row["same"]


@pytest.mark.parametrize(
    ("strategy", "point"),
    [
        ("dp(3, sync=diloco(4, quorum=2))", "step: forward"),
        ("dp(3, sync=diloco(4, quorum=2, fragments=2, overlap=1))", "step: updated"),
        ("dp(3, sync=diloco(4, quorum=3))", "evaluate: measured"),
    ],
)
def test_the_others_go_on_at_once_when_an_island_is_killed(
    ranks: Ranks, tmp_path: Path, strategy: str, point: str
) -> None:
    results, _, values = lose(ranks, tmp_path, [(2, point, 5 if point.startswith("step") else 2)], strategy)
    assert results[2] is None
    assert results[0]["status"] == "finished"
    assert [loss["ranks"] for loss in results[0]["lost"]] == [[2]]
    assert results[0]["consistency"]["repeated"] == int(point.startswith("step"))
    assert all(bool(value.isfinite().all()) for value in values.values())


LOSING = (
    "dp(4, sync=diloco(4, quorum=2))",
    "dp(4, sync=diloco(4, quorum=3, fragments=2, overlap=1, blend=0.5))",
    'dp(4, sync=gossip("ring", "async"))',
    'dp(4, sync=gossip("ring"))',
    "dp(4, sync=local(4))",
    "dp(4, sync=elastic(2, 0.2, 'async'))",
    "dp(2, sync=diloco(4)) * dp(2, zero=3)",
)
POINTS = ("step: forward", "step: backward done", "step: updated", "step: published", "evaluate: measured")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_random_kills_leave_the_others_training_to_the_end(ranks: Ranks, tmp_path: Path, seed: int) -> None:
    """One island, or two at different times; none hangs (the fixture limits the time), nothing is left behind."""
    random = Random(seed)
    strategy = LOSING[seed % len(LOSING)]
    victims = [2] if strategy.endswith("zero=3)") else random.sample([1, 2, 3], random.choice([1, 1, 2]))
    killed = [(rank, random.choice(POINTS), random.randint(1, 5) + 8 * at) for at, rank in enumerate(victims)]
    killed = [(rank, point, 1 + times % 4 if point.startswith("evaluate") else times) for rank, point, times in killed]
    results, _, values = lose(ranks, tmp_path, killed, strategy)
    assert results[0]["status"] == "finished"
    assert {rank for loss in results[0]["lost"] for rank in loss["ranks"]} >= set(victims[:1])
    assert all(bool(value.isfinite().all()) for value in values.values())
