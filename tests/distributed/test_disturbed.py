"""A rank that is late or killed between any two synchronisations changes nothing: the run ends in the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.training_targets import checkpoint_bytes
from shoal.comm.points import POINTS
from shoal.launch import RankFailed
from shoal.strategy import parse

Ranks = Callable[..., list[Any]]

TARGETS = "distributed.disturb_targets"
JOB = str(Path(__file__).parent / "jobs" / "residual.py") + ":job"
MIXTURE = str(Path(__file__).parent / "jobs" / "plain.py") + ":moe"

RISKY = [
    "start: room for parameters",
    "start: parameters laid out",
    "restore: begun",
    "restore: parameters read",
    "step: gradient added",
    "step: sums received",
    "step: norm known",
    "step: updated",
    "save: contents listed",
    "close: begun",
]
"""Where ranks that share memory write what others read."""

HELD = {
    "dp(2)": JOB,
    "dp(2, zero=1)": JOB,
    "dp(2, zero=2)": JOB,
    "dp(3, zero=3)": JOB,
    "dp(2, zero=3) * accumulate(2)": JOB,
    "dp(2, via=shared())": JOB,
    "dp(3, via=shared())": JOB,
    "dp(3, via=shared()) * accumulate(2)": JOB,
    "dp(2) * dp(2, via=shared())": JOB,
    'pp(2, "1f1b", micro=2) * dp(2, via=shared())': JOB,
    'pp(2, "gpipe", micro=2)': JOB,
    'pp(2, "1f1b", micro=2) * dp(2, zero=1)': JOB,
    "tp(2)": JOB,
    "dp(2, zero=3) * tp(2)": JOB,
    "dp(2, compress=topk(0.1))": JOB,
    "dp(2, zero=1, compress=powersgd(2))": JOB,
    "ep(2)": MIXTURE,
}
"""Every way in which parameters are held, and a job for it."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["dp(2, via=shared())"])
def test_a_late_rank_in_shared_memory_changes_nothing(strategy: str, ranks: Ranks, tmp_path: Path) -> None:
    world = parse(strategy).world
    cases = [[point, rank] for point in RISKY for rank in range(world)]
    asked = {"job": JOB, "strategy": strategy, "folder": str(tmp_path), "cases": cases}
    seen = ranks(f"{TARGETS}:delayed_runs", asked, ranks=world, timeout_s=100)[0]
    assert (seen["differing"], seen["stopped"]) == ([], None)
    assert set(seen["reached"]) >= set(RISKY)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", HELD)
def test_a_rank_late_at_any_point_changes_nothing(strategy: str, ranks: Ranks, tmp_path: Path) -> None:
    asked = {"job": HELD[strategy], "strategy": strategy, "folder": str(tmp_path)}
    seen = ranks(f"{TARGETS}:delayed_runs", asked, ranks=parse(strategy).world, timeout_s=280)[0]
    assert (seen["differing"], seen["stopped"]) == ([], None)
    assert seen["runs"] >= 20


@pytest.mark.timeout(60)
def test_every_point_is_on_the_way_of_some_strategy(ranks: Ranks, tmp_path: Path) -> None:
    reached: set[str] = set()
    strategies = ['pp(2, "1f1b", micro=2) * dp(2, via=shared())', "dp(2, zero=3)", "dp(2, via=shared())"]
    for number, strategy in enumerate(strategies):
        asked = {"job": JOB, "strategy": strategy, "folder": str(tmp_path / str(number)), "cases": [["none", 0]]}
        reached |= set(ranks(f"{TARGETS}:delayed_runs", asked, ranks=parse(strategy).world)[0]["reached"])
    assert reached == set(POINTS)


KILLED = [
    ("dp(2, via=shared())", "step: gradient added", 1),
    ("dp(2, via=shared())", "save: manifest written", 0),
    ("dp(2, zero=3)", "restore: parameters read", 1),
    ('pp(2, "1f1b", micro=2)', "save: in place", 0),
]
"""(strategy, where, which rank), of which one case is in every run of the tests."""


def kill_cases() -> list[Any]:
    every = [(strategy, point, rank) for strategy in HELD for point in POINTS for rank in (0, 1)]
    some = [case for n, case in enumerate(every) if n % 17 == 3 and case not in KILLED]
    return [*KILLED, *(pytest.param(*case, marks=pytest.mark.slow) for case in some)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("strategy", "point", "victim"), kill_cases())
def test_a_rank_killed_at_a_point_resumes_to_the_same_bits(
    strategy: str, point: str, victim: int, ranks: Ranks, tmp_path: Path
) -> None:
    world, target = parse(strategy).world, f"{TARGETS}:train_and_be_killed"
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    common = {"job": HELD.get(strategy, JOB), "strategy": strategy, "steps": 6, "checkpoint_every": 1, "gate": False}
    ranks(target, {**common, "folder": str(plain)}, ranks=world)
    ranks(target, {**common, "folder": str(killed), "steps": 3}, ranks=world)
    asked = {**common, "folder": str(killed), "resume": str(killed), "victim": victim, "point": point}
    reason = ""
    try:
        # A point that this strategy or rank does not reach ends the run undisturbed.
        ranks(target, {**asked, "time": 1, "steps": 5}, ranks=world)
    except RankFailed as error:
        reason = str(error)
    assert "SIGKILL" in reason or (not reason and (strategy, point, victim) not in KILLED)
    ranks(target, {**common, "folder": str(killed), "resume": str(killed)}, ranks=world)
    expected = checkpoint_bytes(plain, 6)
    assert len(expected) > 10
    assert checkpoint_bytes(killed, 6) == expected


@pytest.mark.parametrize(
    ("strategy", "rank", "what", "name"),
    [
        ("dp(2, via=shared())", 1, "parameter", "parameter head."),
        ("dp(2)", 1, "parameter", "parameter head."),
        ("dp(2, zero=3)", 0, "state", "exp_avg of "),
        ("dp(2) * tp(2)", 3, "buffer", "buffer shift"),
    ],
)
def test_what_a_rank_holds_after_a_restore_is_compared_with_the_checkpoint(
    strategy: str, rank: int, what: str, name: str, ranks: Ranks, tmp_path: Path
) -> None:
    asked = {"job": JOB, "strategy": strategy, "folder": str(tmp_path), "rank": rank, "what": what}
    for said in ranks(f"{TARGETS}:spoilt_restore", asked, ranks=parse(strategy).world):
        assert f"the ranks' {name}" in said
        assert "differs from the checkpoint" in said
