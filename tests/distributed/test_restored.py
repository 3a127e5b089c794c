"""Runs that lose a rank which the others cannot go on without: they take up their last checkpoint by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed.conftest import load
from shoal.common.hindrance import without_killed
from shoal.launch import RankFailed
from shoal.strategy import parse
from shoal.training.options import TrainOptions
from shoal.training.record.run import RUN, read_json
from shoal.training.restored import train_restoring

LOOSE = str(Path(__file__).parent / "jobs" / "loose.py")
STEPS, EVERY = 22, 6
CUTS = range(0, STEPS, EVERY)


@pytest.fixture(autouse=True)
def loaded() -> None:
    load("distributed.server_targets")


def train(folder: Path, strategy: str, fail: str | None = None, **more: Any) -> tuple[list[Any], list[Any]]:
    """The outcomes of all ranks, and what was reported."""
    folder.mkdir()
    options = TrainOptions(
        job=LOOSE, strategy=strategy, folder=str(folder), gate=False, checkpoint_every=EVERY, fail=fail
    )
    said: list[Any] = []
    outcomes = train_restoring(options, parse(strategy).world, hang_after_s=30, on_message=said.append, **more)
    return outcomes, said


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        ("dp(2, sync=asp(), via=ps(2))", 3),
        ("dp(2, sync=asp(), via=ps(2))", 2),
        ("dp(3, sync=ssp(2), via=ps(2, colocated=True))", 1),
        ("dp(3, sync=local(3))", 0),
        pytest.param("dp(3, sync=softsync(2), via=ps(1))", 3, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=bsp(backup=1), via=ps(1))", 0, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=hogwild())", 0, marks=pytest.mark.slow),
        pytest.param('dp(4, sync=gossip("ring"))', 0, marks=pytest.mark.slow),
    ],
    ids=[
        "a shard",
        "the coordinator",
        "a worker with a shard",
        "the first island",
        "softsync",
        "backup",
        "hogwild",
        "gossip",
    ],
)
def test_a_lost_server_and_a_lost_first_island_are_restored(tmp_path: Path, strategy: str, lost: int) -> None:
    outcomes, said = train(tmp_path / "run", strategy, f"rank {lost} at step 15")
    first = outcomes[0]
    assert (first["status"], first["step"]) == ("finished", STEPS)
    (row,) = first["restored"]
    assert row["rank"] == lost
    assert row["resumed_at"] in CUTS
    assert 0 <= row["repeated_steps"] == row["step"] - row["resumed_at"] <= 15
    assert row["took_s"] > 0
    assert [each["rank"] for each in said if each["event"] == "restored"] == [lost]
    facts = read_json(tmp_path / "run" / RUN)
    assert facts["summary"]["restored"] == first["restored"]
    assert facts["resumed"][-1]["step"] == row["resumed_at"]
    if "servers" in first and "asp" in strategy:
        # Every ticket after the checkpoint was learned from once more, and once.
        assert first["servers"]["gradients"] == 2 * (STEPS - row["resumed_at"])


@pytest.mark.parametrize("lost", [2, 1])
def test_under_bsp_a_restored_run_has_the_numbers_of_an_undisturbed_one(tmp_path: Path, lost: int) -> None:
    """Lost before the first checkpoint (a server), and after it (a worker, which bsp cannot spare)."""
    step = 4 if lost == 2 else 14
    found = {
        name: train(tmp_path / name, "dp(2, via=ps(1))", fail)[0][0]
        for name, fail in (("calm", None), ("lost", f"rank {lost} at step {step}"))
    }
    assert found["lost"]["restored"][0]["resumed_at"] == (0 if lost == 2 else 12)
    calm, again = (
        [json.loads(line) for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]
        for name in ("calm", "lost")
    )
    assert [row["loss"] for row in again] == [row["loss"] for row in calm]
    assert found["lost"]["metrics"] == found["calm"]["metrics"]


def test_a_rank_that_is_always_lost_at_the_same_place_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 2 was killed by SIGKILL") as error:
        train(tmp_path / "run", "dp(2, sync=asp(), via=ps(1))", "rank 2 at step 9; rank 2 at step 10")
    assert error.value.rank == 2


def test_without_servers_and_islands_a_lost_rank_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        train(tmp_path / "run", "dp(2)", "rank 1 at step 9")


def test_what_struck_once_does_not_strike_a_run_that_is_started_again() -> None:
    assert without_killed("rank 2 at step 9; rank 1 at step 3; rank 2 at step 4", 2) == (
        "rank 2 at step 9; rank 1 at step 3"
    )
    assert without_killed("rank 2 at step 9", 2) is None
    assert without_killed("rank 2 at step 9", 1) == "rank 2 at step 9"
