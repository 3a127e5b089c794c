"""Plans of replicas that do not wait for each other: servers and quorums, with and without stragglers."""

from __future__ import annotations

import pytest

from shoal.api.plan import CannotPlan, plan
from shoal.strategy import parse
from shoal.strategy.terms.sync import Served


def served(sync: str, *straggler: str):
    return plan("gpt:125m", cluster="dgx-a100", devices=16, batch="64", top=1, sync=sync, straggler=straggler).report


@pytest.mark.parametrize("sync", ["asp()", "bsp(backup=1)", "diloco(32, quorum=2)"])
def test_with_a_straggler_it_pays_not_to_wait(sync: str) -> None:
    report = served(sync, "rank 2: 5x")
    best = report["served"][0]
    assert best["sooner"] > 2
    assert best["bsp_step_s"] > 3 * best["step_s"]
    assert report["servers"][-1] == f"So: {best['strategy']}"
    assert [row["score_s"] for row in report["served"]] == sorted(row["score_s"] for row in report["served"])
    assert len(report["plans"]) == 1  # The plans whose replicas step together stay.


def test_a_bound_on_staleness_waits_for_a_rank_that_is_always_slow() -> None:
    bounded, free = (served(sync, "rank 2: 5x")["served"][0] for sync in ("ssp(3)", "asp()"))
    assert bounded["step_s"] > 2 * free["step_s"]
    assert bounded["waiting"] > 0.3 > free["waiting"]


def test_staleness_is_part_of_the_steps_to_the_target() -> None:
    for row in served("asp()")["served"]:
        level = parse(row["strategy"]).dp_levels[0]
        assert isinstance(level.sync, Served)
        assert row["staleness_mean"] == pytest.approx(level.n - 1, abs=0.2)
        assert 1.04 < row["steps_factor"] < 1.11  # AdamW: a tenth for each step of staleness.


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"straggler": ["rank 2: 5x"]}, "plans weigh stragglers for rules under which replicas do not wait"),
        ({"sync": "asp()", "straggler": ["rank 99: 5x"]}, "has ranks 0 to"),
        ({"sync": "hogwild()"}, "plans know bsp"),
        ({"sync": "asp("}, "closing parenthesis"),
    ],
)
def test_what_cannot_be_planned_is_refused(given: dict, reason: str) -> None:
    with pytest.raises(CannotPlan, match=reason):
        plan("gpt:125m", cluster="dgx-a100", devices=16, batch="64", top=1, **given)
