"""Local SGD: islands that step by themselves, held to a simulation of all of them in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.strategy import REGISTRY
from shoal.strategy.terms.term import technique_names
from shoal.training.entry import train_run
from shoal.training.record.run import STEPS, VALIDATION, read_lines, read_run

Ranks = Callable[..., list[Any]]
LOOSE = str(Path(__file__).parent / "jobs" / "loose.py")
PROVE = "distributed.island_targets:prove_islands"
TWO = [
    ("plain", "dp(2, sync=local(3))"),
    ("norm", "dp(2, sync=local(2))"),
    ("momentum", "dp(2, sync=local(4))"),
    ("dropout", "dp(2, sync=local(3))"),
    ("unused", "dp(2, sync=local(2))"),
    ("sometimes", "dp(2, sync=local(3))"),
    ("uneven", "dp(2, sync=local(2))"),
    ("plain", "dp(2, sync=local(3)) * accumulate(2)"),
    ("plain", 'dp(2, sync=local(2, state="averaged"))'),
    ("uneven", 'dp(2, sync=diloco(2, state="averaged"))'),
    ("momentum", 'dp(2, sync=local(2, state="averaged", m=4))'),
    ("unused", 'dp(2, sync=local(3, state="averaged"))'),
    ("plain", 'dp(2, sync=local(2, state="averaged", m=4, v=6))'),
    ("plain", "dp(2, sync=local(100))"),
    ("ignored", "dp(2, sync=local(3))"),
    ("trust", "dp(2, sync=local(3))"),
]
FOUR = [
    ("plain", "dp(2, sync=local(3)) * dp(2)"),
    ("plain", "dp(2, sync=local(3)) * dp(2, zero=1)"),
    ("plain", "dp(2, sync=local(3)) * dp(2, zero=3)"),
    ("plain", "dp(2, sync=local(2)) * dp(2, via=shared())"),
    ("plain", 'dp(2, sync=local(3)) * pp(2, "1f1b", micro=3)'),
    ("ignored", "dp(2, sync=diloco(3)) * dp(2, zero=2)"),
    ("plain", 'dp(2, sync=local(2, state="averaged", v=4)) * dp(2, zero=1)'),
    ("plain", "dp(2, sync=diloco(4)) * dp(2, sync=local(2))"),
    ("uneven", "dp(2, sync=local(6)) * dp(2, sync=local(2))"),
    ("norm", "dp(2, sync=local(4)) * dp(2, sync=diloco(2))"),
    ("ignored", "dp(2, sync=bmuf(6)) * dp(2, sync=local(3))"),
    ("plain", 'dp(2, sync=diloco(4)) * dp(2, sync=local(2, state="averaged"))'),
    ("short", "dp(4, sync=local(3))"),
    ("ignored", 'dp(4, sync=gossip("ring"))'),
]


COUNTED = [
    ("norm", "dp(2, sync=local(2)) * dp(2, zero=3)"),
    ("norm", "dp(2, sync=local(3)) * tp(2)"),
    ("norm", "dp(2, sync=diloco(4)) * dp(2, sync=local(2))"),
    ("norm", 'dp(2, sync=local(2)) * pp(2, "1f1b", micro=2)'),
    ("plain", "dp(2, sync=local(3)) * tp(2)"),
]


def limit(case: tuple[str, str]) -> float:
    """Of a proof's difference. A bias before batch norm has no gradient but rounding, of which Adam makes steps: the
    running mean follows it, also under dp(2)."""
    return 1e-9 if case[0] == "norm" else 1e-10


def proven(ranks: Ranks, cases: list[tuple[str, str]], *, world: int, target: str = PROVE) -> list[float]:
    """The largest difference of each case over all ranks; infinite, where the ledger is not as predicted."""
    asked = {"cases": [(job, text, text) for job, text in cases], "steps": 7}
    found = []
    for case, rows in zip(cases, zip(*ranks(target, asked, ranks=world), strict=True), strict=True):
        assert sum(row["compared"] for row in rows) > 0, case
        found.append(max(float("inf") if row["ledger"] else row["difference"] for row in rows))
    return found


def test_islands_train_as_their_simulation(ranks: Ranks) -> None:
    for case, difference in zip(TWO, proven(ranks, TWO, world=2), strict=True):
        assert difference < limit(case), case


def test_islands_of_several_ranks_train_as_their_simulation(ranks: Ranks) -> None:
    for case, difference in zip(FOUR, proven(ranks, FOUR, world=4), strict=True):
        assert difference < limit(case), case


@pytest.mark.parametrize("scheme", [*(REGISTRY[name].example() for name in technique_names("sync")), "slowmo(2)"])
def test_every_scheme_trains_as_its_simulation(ranks: Ranks, scheme: str) -> None:
    often = re.sub(r"\(\d+", "(3", scheme)
    cases = [("norm", f"dp(2, sync={often})"), ("uneven", f"dp(2, sync={often})")]
    for case, difference in zip(cases, proven(ranks, cases, world=2), strict=True):
        assert difference < limit(case), case


def test_what_islands_send_over_two_periods_is_what_is_estimated(ranks: Ranks) -> None:
    asked = {"cases": [(job, text, text) for job, text in COUNTED], "steps": 6}
    for case, rows in zip(COUNTED, zip(*ranks(PROVE, asked, ranks=4), strict=True), strict=True):
        assert [row["ledger"] for row in rows] == [[]] * 4, case


@pytest.mark.parametrize("job", ["sgd", "sparse"])
def test_averaging_after_every_step_of_plain_sgd_is_the_synchronous_run(ranks: Ranks, job: str) -> None:
    asked = {"cases": [(job, "dp(2, sync=local(1))", "dp(2)"), (job, "dp(2, sync=local(2))", "dp(2)")], "steps": 6}
    once, twice = zip(*ranks(PROVE, asked, ranks=2), strict=True)
    assert max(row["difference"] for row in once if "gradient" not in row["where"]) < 1e-10
    assert max(row["difference"] for row in twice) > 1e-6


IDENTITIES = [
    ("plain", "dp(2, sync=diloco(3, lr=1.0, momentum=0.0))", "dp(2, sync=local(3))"),
    ("plain", "dp(2, sync=bmuf(3, momentum=0.0))", "dp(2, sync=local(3))"),
    ("sgd", "dp(2, sync=diloco(1, lr=1.0, momentum=0.0))", "dp(2)"),
    ("plain", "dp(2, sync=bmuf(2, momentum=0.6))", 'dp(2, sync=diloco(2, lr=1.0, momentum=0.6, form="heavy-ball"))'),
    ("plain", "dp(2, sync=bmuf(2, momentum=0.6, nesterov=True))", "dp(2, sync=bmuf(2, momentum=0.6))"),
    ("momentum", 'dp(2, sync=local(1, state="averaged"))', "dp(2)"),
    ("plain", "dp(2, sync=diloco(2))", 'dp(2, sync=diloco(2, form="heavy-ball"))'),
    ("momentum", "dp(2, sync=local(1))", "dp(2)"),
    ("plain", 'dp(2, sync=local(2, state="averaged", v=4))', 'dp(2, sync=local(2, state="averaged"))'),
]
"""A strategy, and one that is the same; the last four are not."""


def test_schemes_are_each_other_where_their_formulas_are(ranks: Ranks) -> None:
    found = ranks(PROVE, {"cases": IDENTITIES, "steps": 7}, ranks=2)
    *same, nesterov, form, momentum, period = zip(*found, strict=True)
    for case, rows in zip(IDENTITIES, same, strict=False):
        assert max(row["difference"] for row in rows if "gradient" not in row["where"]) < 1e-10, case
    for rows in (nesterov, form, momentum, period):
        assert max(row["difference"] for row in rows) > 1e-6


TWO_LEVELS = [
    ("sgd", "dp(2, sync=local(4)) * dp(2, sync=local(1))", "dp(2, sync=local(4)) * dp(2)"),
    ("plain", "dp(2, sync=local(2)) * dp(2, sync=local(2))", "dp(4, sync=local(2))"),
    ("plain", "dp(2, sync=local(4)) * dp(2, sync=local(2))", "dp(4, sync=local(4))"),
]
"""Two loose levels, and what they are; the last is not."""


def test_an_inner_level_that_averages_in_every_step_is_a_synchronous_one(ranks: Ranks) -> None:
    *same, other = zip(*ranks(PROVE, {"cases": TWO_LEVELS, "steps": 9}, ranks=4), strict=True)
    for case, rows in zip(TWO_LEVELS, same, strict=False):
        assert max(row["difference"] for row in rows if "gradient" not in row["where"]) < 1e-10, case
    assert max(row["difference"] for row in other) > 1e-6


def test_an_inner_round_that_is_measured_from_before_the_outer_one_is_found(ranks: Ranks) -> None:
    case = [("plain", "dp(2, sync=diloco(4)) * dp(2, sync=diloco(2))")]
    assert proven(ranks, case, world=4)[0] < 1e-10
    assert proven(ranks, case, world=4, target="distributed.island_targets:stale_inner_anchor")[0] > 1e-6


def test_one_island_is_one_worker_with_the_outer_optimiser(ranks: Ranks) -> None:
    cases = [("plain", "dp(1, sync=diloco(3))"), ("plain", "dp(1, sync=bmuf(2))")]
    for case, difference in zip(cases, proven(ranks, cases, world=1), strict=True):
        assert difference < limit(case), case


def test_a_pseudo_gradient_of_the_wrong_sign_is_found(ranks: Ranks) -> None:
    case = [("plain", "dp(2, sync=diloco(2))")]
    assert proven(ranks, case, world=2, target="distributed.island_targets:wrong_sign")[0] > 1e-6


def test_moments_that_are_not_averaged_are_found(ranks: Ranks) -> None:
    case = [("plain", 'dp(2, sync=local(2, state="averaged"))')]
    assert proven(ranks, case, world=2, target="distributed.island_targets:moments_stay")[0] > 1e-6


@pytest.mark.parametrize(("fault", "job"), [("never_averaged", "plain"), ("equal_weights", "uneven")])
def test_a_wrong_average_is_found(ranks: Ranks, fault: str, job: str) -> None:
    case = [(job, "dp(2, sync=local(2))")]
    assert proven(ranks, case, world=2, target=f"distributed.island_targets:{fault}")[0] > 1e-6


@pytest.mark.parametrize(
    ("strategy", "world", "at"),
    [
        ("dp(2, sync=local(4))", 2, 4),
        ("dp(2, sync=local(4))", 2, 6),
        ("dp(2, sync=local(4)) * dp(2, zero=3)", 4, 6),
        ("dp(2, sync=slowmo(4))", 2, 6),
        ("dp(2, sync=slowmo(4)) * dp(2, zero=1)", 4, 5),
        ("dp(2, sync=diloco(4)) * dp(2, zero=3)", 4, 6),
        ("dp(2, sync=bmuf(4))", 2, 6),
        ("dp(2, sync=diloco(4)) * dp(2, sync=diloco(2))", 4, 7),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(ranks: Ranks, tmp_path: Path, strategy: str, world: int, at: int) -> None:
    asked = {"job": "norm", "strategy": strategy, "at": at, "steps": 11, "folder": str(tmp_path)}
    for row in ranks("distributed.island_targets:resumed", asked, ranks=world):
        assert row["more"] == row["then"]
        assert row["same"]


def test_what_a_scheme_keeps_is_part_of_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    asked = {"job": "plain", "strategy": "dp(2, sync=slowmo(4))", "at": 6, "steps": 11, "folder": str(tmp_path)}
    assert not any(row["same"] for row in ranks("distributed.island_targets:forgetful", asked, ranks=2))


@pytest.mark.parametrize("under", ["dp(2)", "dp(2, zero=3)"])
def test_any_strategy_goes_on_from_what_islands_agree_on(ranks: Ranks, tmp_path: Path, under: str) -> None:
    asked = {
        "job": "plain",
        "strategy": "dp(2, sync=local(4))",
        "at": 6,
        "steps": 9,
        "folder": str(tmp_path),
        "under": under,
    }
    rows = ranks("distributed.island_targets:resumed", asked, ranks=2)
    assert rows[0]["then"] == rows[1]["then"]
    assert len(rows[0]["then"]) == 3


def test_islands_evaluate_and_save_when_they_meet_and_send_nothing_else(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = {
        "job": LOOSE,
        "strategy": "dp(2, sync=local(4))",
        "folder": str(folder),
        "gate": False,
        "checkpoint_every": 5,
    }
    outcome = ranks(train_run, asked, ranks=2)[0]
    assert outcome["status"] == "finished"
    # Wanted every 3 steps, of 22; and every 5. The end of the run is a meeting as well.
    assert [row["step"] for row in read_lines(folder / VALIDATION)] == [4, 8, 12, 16, 20, 22]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000020", "step-00000022"]
    sending = [row["step"] for row in read_lines(folder / STEPS) if row["sent_bytes"]]
    assert sending == [4, 8, 12, 16, 20]


def test_the_record_has_what_a_step_sends_on_the_average_of_a_period(ranks: Ranks, tmp_path: Path) -> None:
    """A run that ends between two exchanges does not report a step that sends nothing."""
    job = str(Path(__file__).parent / "jobs" / "loose.py")
    asked = {"job": job, "strategy": "dp(2, sync=diloco(5))", "folder": str(tmp_path / "run"), "gate": False}
    [found, _] = ranks("shoal.training.entry:train_run", asked, ranks=2)
    run = read_run(tmp_path / "run")
    assert run.ledger.bytes == 0
    assert found["sent_bytes"] == run.sent_bytes == run.predicted_bytes
    assert run.sent_bytes == run.ledger_of_run.without("setup", "shapes", "agreement").bytes / 20
