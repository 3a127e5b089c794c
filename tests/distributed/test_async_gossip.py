"""Islands that exchange two at a time, when they are ready: what timing decided is replayed in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.test_lost_islands import lose
from shoal.proof.replay import ContradictoryLog, in_order

Ranks = Callable[..., list[Any]]
TARGETS = "distributed.gossip_targets"
PROVE = f"{TARGETS}:prove_async"
CASES = [
    ("plain", 'dp(4, sync=gossip("ring", "async"))'),
    ("norm", 'dp(4, sync=gossip("torus", "async", h=2))'),
    ("uneven", "dp(4, sync=elastic(2, 0.4, 'async'))"),
    ("momentum", "dp(4, sync=elastic(1, 0.3, 'async'))"),
]


def proven(ranks: Ranks, cases: list[tuple[str, str]], *, target: str = PROVE, slow: int | None = None) -> list[Any]:
    asked = {"cases": cases, "steps": 8, "slow": slow}
    return list(zip(*ranks(target, asked, ranks=4), strict=True))


def test_a_run_is_its_own_log_replayed(ranks: Ranks) -> None:
    for case, rows in zip(CASES, proven(ranks, CASES), strict=True):
        assert sum(row["compared"] for row in rows) > 0
        assert max(row["difference"] for row in rows) < 1e-10, case
        assert [row["ledger"] for row in rows] == [[]] * 4, case


def test_no_rank_waits_for_a_slow_one_and_staleness_is_recorded(ranks: Ranks) -> None:
    """Rank 2 answers and sleeps in every step: those that ask it go on, and its updates are of an older model."""
    (rows,) = proven(ranks, [("plain", 'dp(4, sync=gossip("ring", "async"))')], slow=2)
    assert max(row["difference"] for row in rows) < 1e-10
    kinds = [[kind for kind, *_ in row["log"]] for row in rows]
    assert all(log.count("update") == 8 for log in kinds)
    before_its_last = kinds[2][: len(kinds[2]) - 1 - kinds[2][::-1].index("update")]
    assert before_its_last.count("average") > 0
    assert rows[2]["consistency"]["staleness"]["max"] > 0
    assert max(row["consistency"].get("ahead", {"max": 0})["max"] for row in rows) > 1


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("lost_average", 'dp(4, sync=gossip("ring", "async"))'),
        ("overwritten", 'dp(4, sync=gossip("ring", "async"))'),
        ("lost_average", "dp(4, sync=elastic(1, 0.3, 'async'))"),
    ],
)
def test_a_wrong_exchange_is_found(ranks: Ranks, fault: str, strategy: str) -> None:
    (rows,) = proven(ranks, [("plain", strategy)], target=f"{TARGETS}:{fault}", slow=2)
    assert max(row["difference"] for row in rows) > 1e-6


@pytest.mark.parametrize("strategy", ['dp(2, sync=gossip("ring", "async"))', "dp(2, sync=elastic(2, 0.4, 'async'))"])
def test_an_island_goes_on_from_what_it_was_saved_with(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    for row in ranks(f"{TARGETS}:restored", {"strategy": strategy, "folder": str(tmp_path)}, ranks=2):
        assert row["same"]
        assert len(row["losses"]) == 3
        assert row["clock"] == 8


@pytest.mark.parametrize(
    ("strategy", "killed"),
    [
        ('dp(4, sync=gossip("ring", "async"))', 2),
        ('dp(4, sync=gossip("ring", "async"))', 3),
        ("dp(3, sync=elastic(2, 0.3, 'async'))", 2),
    ],
)
def test_the_others_go_on_when_one_that_asks_or_answers_is_killed(
    ranks: Ranks, tmp_path: Path, strategy: str, killed: int
) -> None:
    results, _, values = lose(ranks, tmp_path, [(killed, "step: forward", 6)], strategy)
    assert [number for number, result in enumerate(results) if result is None] == [killed]
    assert results[0]["status"] == "finished"
    assert [loss["ranks"] for loss in results[0]["lost"]] == [[killed]]
    assert all(bool(value.isfinite().all()) for value in values.values())


def test_logs_that_contradict_each_other_are_refused() -> None:
    average = ("average", 1, 1, 0, 1)
    first = [("update", 0, 1, -1, -1), average, ("read", 0, 1, -1, -1)]
    second = [("update", 1, 1, -1, -1), average, ("read", 1, 1, -1, -1)]
    assert [row[0] for row in in_order([first, second])] == ["update", "update", "average", "read", "read"]
    with pytest.raises(ContradictoryLog):
        in_order([first, second[:1]])
    with pytest.raises(ContradictoryLog):
        in_order([first, [second[0], ("average", 1, 1, 0, 2)]])
