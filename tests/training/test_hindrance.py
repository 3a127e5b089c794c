"""Ranks that are slowed or killed on purpose: what the words mean, and how long a rank sleeps."""

from __future__ import annotations

import time

import pytest

from shoal.common.hindrance import BadHindrance, KilledRank, SlowRanks, read_killed_ranks, read_slow_ranks
from shoal.training.hindered import Hindered
from shoal.training.local import train_job
from shoal.training.options import TrainOptions
from shoal.training.resumed import CannotTrain


def test_words_are_read() -> None:
    text = "rank 2: 3x; random 10%: 5x ;all: 20 ms; rank 0: 1.5 s"
    assert read_slow_ranks(text, world=4) == (
        SlowRanks(rank=2, factor=3),
        SlowRanks(chance=0.1, factor=5),
        SlowRanks(added_s=0.02),
        SlowRanks(rank=0, added_s=1.5),
    )
    assert read_killed_ranks("rank 3 at step 40", world=4) == (KilledRank(rank=3, step=40),)
    assert read_slow_ranks(None, world=1) == read_killed_ranks("", world=1) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank 4: 3x", "ranks 0 to 3"),
        ("rank 1: 0.5x", "at least 1x"),
        ("random 0%: 2x", "above 0%"),
        ("random 101%: 2x", "up to 100%"),
        ("rank 1", "expected who and how much"),
        ("all: much", "expected who"),
        ("all: 1.2.3 ms", "is no number"),
    ],
)
def test_slow_ranks_that_cannot_be_meant_are_refused(text: str, said: str) -> None:
    with pytest.raises(BadHindrance, match=said):
        read_slow_ranks(text, world=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [("rank 9 at step 3", "ranks 0 to 3"), ("rank 1 at step 0", "from 1"), ("rank 1", "such as")],
)
def test_kills_that_cannot_be_meant_are_refused(text: str, said: str) -> None:
    with pytest.raises(BadHindrance, match=said):
        read_killed_ranks(text, world=4)


@pytest.mark.parametrize("wrong", [{"straggler": "rank 2: 3x"}, {"fail": "rank 2 at step 1"}])
def test_a_run_with_ranks_that_it_does_not_have_is_refused_before_it_starts(wrong: dict[str, str]) -> None:
    with pytest.raises(CannotTrain, match="ranks 0 to 1"):
        train_job("language:tiny", "dp(2)", **wrong)


def test_random_stragglers_are_a_function_of_seed_step_and_rank() -> None:
    (slow,) = read_slow_ranks("random 10%: 5x", world=8)
    struck = [[slow.strikes(rank, step, seed=3) for rank in range(8)] for step in range(1000)]
    assert struck == [[slow.strikes(rank, step, seed=3) for rank in range(8)] for step in range(1000)]
    assert 0.08 < sum(map(sum, struck)) / 8000 < 0.12
    assert any(sum(row) == 1 for row in struck), "ranks are struck one by one"
    assert struck != [[slow.strikes(rank, step, seed=4) for rank in range(8)] for step in range(1000)]


def hindered(rank: int, straggler: str) -> Hindered:
    return Hindered(TrainOptions(job="language:tiny", straggler=straggler), rank=rank, world=3, seed=0)


def test_a_rank_sleeps_in_proportion_to_what_it_computed_and_not_to_what_it_waited() -> None:
    slow = hindered(2, "rank 2: 3x")
    slow.before_step(1)
    time.sleep(0.05)  # As for another rank.
    until_s = time.thread_time() + 0.02
    while time.thread_time() < until_s:
        pass
    slow.after_step()
    assert 0.04 <= slow.sleep_s(2) < 0.08
    slow.before_step(2)
    assert slow.slept_s >= 0.04


def test_added_time_is_multiplied_like_computing() -> None:
    assert hindered(2, "all: 20 ms; rank 2: 3x").sleep_s(1) == pytest.approx(0.06)
    assert hindered(1, "all: 20 ms; rank 2: 3x").sleep_s(1) == pytest.approx(0.02)
