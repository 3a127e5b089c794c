"""Parameter servers on real ranks: the same model as an all-reduce gives, whoever serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.strategy import parse
from shoal.strategy.islands import losable
from shoal.training.record.run import RUN, read_json

Ranks = Callable[..., list[Any]]
PROVE = "distributed.server_targets:prove_served"

MOE = str(Path(__file__).parents[2] / "examples" / "moe.py")

COLOCATED = [
    ("plain", "dp(2, via=ps(1, colocated=True))"),
    ("norm", "dp(2, via=ps(2, colocated=True))"),
    ("unused", "dp(2, via=ps(2, colocated=True))"),
    ("uneven", "dp(2, via=ps(2, colocated=True))"),
    ("momentum", "dp(2, via=ps(2, colocated=True)) * accumulate(2)"),
    ("plain", "dp(2, sync=ssp(0))"),
]


def proven(ranks: Ranks, cases: list[tuple[str, str]], *, world: int, steps: int = 5) -> None:
    asked = {"cases": [(job, text, "dp(2)") for job, text in cases], "steps": steps}
    for case, rows in zip(cases, zip(*ranks(PROVE, asked, ranks=world), strict=True), strict=True):
        assert sum(row["compared"] for row in rows) > 0, case
        assert max(row["difference"] for row in rows) < 1e-10, (case, rows)
        assert [row["ledger"] for row in rows] == [[]] * world, case


def test_servers_among_workers_train_as_one_process(ranks: Ranks) -> None:
    proven(ranks, COLOCATED, world=2)


DEDICATED = [
    ("plain", "dp(2, via=ps(2))"),
    ("norm", "dp(2, via=ps(2))"),
    ("sometimes", "dp(2, via=ps(2))"),
    ("matrices", "dp(2, via=ps(2))"),
    ("trust", "dp(3, via=ps(1))"),
    ("dropout", "dp(3, via=ps(1))"),
    ("uneven", "dp(2, sync=ssp(0), via=ps(2))"),
    ("uneven", "dp(3, via=ps(1))"),
]
INSIDE = [
    ("plain", "dp(4, via=ps(2, colocated=True, levels=2))"),
    ("plain", "dp(2, via=ps(2, colocated=True)) * tp(2)"),
    ("plain", "dp(2, via=ps(2, colocated=True)) * dp(2, zero=3)"),
    ("unused", "dp(2, via=ps(1, colocated=True)) * dp(2, zero=2)"),
    ("plain", 'dp(2, via=ps(2, colocated=True)) * pp(2, "1f1b", micro=3)'),
    ("plain", "dp(2, sync=ssp(0), via=ps(1, colocated=True)) * dp(2, zero=1)"),
    ("plain", 'dp(1, via=ps(1)) * pp(2, "1f1b", micro=2)'),
    ("uneven_tokens", "dp(2, via=ps(2, colocated=True)) * cp(2)"),
    (MOE, "dp(2, via=ps(1, colocated=True)) * ep(2)"),
]


def test_servers_of_their_own_train_as_one_process(ranks: Ranks) -> None:
    proven(ranks, DEDICATED, world=4)


def test_servers_of_sharded_and_cut_replicas_train_as_one_process(ranks: Ranks) -> None:
    proven(ranks, INSIDE, world=4)


REPLAYED = "distributed.server_targets:replayed"
ASYNCHRONOUS = [
    ("plain", "dp(2, sync=asp(), via=ps(2))"),
    ("momentum", 'dp(3, sync=asp(lr="staleness"), via=ps(1))'),
    ("plain", "dp(3, sync=asp(compensate=0.5), via=ps(1))"),
    ("unused", "dp(3, sync=softsync(2), via=ps(1))"),
    ("norm", "dp(3, sync=ssp(2), via=ps(1))"),
    ("plain", "dp(3, sync=bsp(backup=1), via=ps(1))"),
    ("uneven", "dp(4, sync=asp())"),
    ("plain", "dp(2, sync=asp()) * dp(2, zero=3)"),
    ("plain", "dp(4, sync=asp(), via=ps(2, colocated=True, levels=2))"),
    ("plain", 'dp(2, sync=ssp(1)) * pp(2, "1f1b", micro=3)'),
    ("wide", "dp(3, sync=asp(), via=ps(1), compress=topk(0.05))"),
    ("ignored", "dp(3, sync=asp(), via=ps(1))"),
    ("wide", "dp(2, sync=ssp(1), via=ps(2), compress=dgc(0.1))"),
    ("wide", "dp(3, sync=bsp(backup=1), via=ps(1), compress=int8())"),
]


def differences(ranks: Ranks, cases: list[tuple[str, str]], *, target: str = REPLAYED) -> list[float]:
    """How far each run is from its replay; infinite where a ticket's ledger is not as predicted."""
    found = []
    for case, rows in zip(cases, zip(*ranks(target, {"cases": cases, "steps": 6}, ranks=4), strict=True), strict=True):
        assert sum(row["compared"] for row in rows) > 0, case
        worst = max(max(row["difference"], row["losses"]) for row in rows)
        found.append(float("inf") if any(row["ledger"] for row in rows) else worst)
    return found


def test_what_depends_on_speed_is_repeated_from_the_log(ranks: Ranks) -> None:
    for case, difference in zip(ASYNCHRONOUS, differences(ranks, ASYNCHRONOUS), strict=True):
        assert difference < 1e-10, case


@pytest.mark.parametrize("fault", ["off_by_one", "applied_twice", "never_pulled", "forgets_the_rest"])
def test_a_replay_finds_what_servers_do_wrong(ranks: Ranks, fault: str) -> None:
    case = [("plain", "dp(2, sync=asp(), via=ps(2))")]
    if fault == "forgets_the_rest":
        case = [("wide", "dp(2, sync=asp(), via=ps(2), compress=topk(0.05))")]
    assert differences(ranks, case, target=f"distributed.server_targets:{fault}")[0] > 1e-6


def test_strangers_at_the_ports_of_servers_are_refused_and_change_nothing(ranks: Ranks) -> None:
    asked = {"cases": [("plain", "dp(2, sync=asp(), via=ps(2))")], "steps": 4, "strangers": 10}
    found = ranks("distributed.server_targets:among_strangers", asked, ranks=4)
    assert max(max(row["difference"], row["losses"]) for each in found for row in each["rows"]) < 1e-10
    assert sum(row["compared"] for each in found for row in each["rows"]) > 0
    for rank, each in enumerate(found):
        assert each["strangers"] >= 10
        assert each["open"] == 0  # Ports close once all ranks are there.
        assert any(f"rank {rank} refused" in line and "this job's token" in line for line in each["refused"]), each


RESUMED = "distributed.server_targets:resumed_served"


@pytest.mark.parametrize("under", ["dp(2, via=ps(1))", "dp(3)", "dp(2, via=ps(2, colocated=True))"])
def test_a_run_goes_on_from_its_checkpoint_with_or_without_servers(ranks: Ranks, tmp_path: Path, under: str) -> None:
    strategy, world = (under, 2) if "colocated" in under else ("dp(2, via=ps(1))", 3)
    asked = {"job": "plain", "strategy": strategy, "under": under, "at": 3, "steps": 6, "folder": str(tmp_path)}
    assert max(row["difference"] for row in ranks(RESUMED, asked, ranks=world)) < 1e-12


def test_what_compressed_pushes_kept_is_part_of_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    strategy = "dp(2, via=ps(1), compress=topk(0.05))"
    asked = {"job": "wide", "strategy": strategy, "under": strategy, "at": 3, "steps": 6, "folder": str(tmp_path)}
    assert max(row["difference"] for row in ranks(RESUMED, asked, ranks=3)) < 1e-12


def test_the_state_of_the_servers_is_part_of_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    asked = {
        "job": "momentum",
        "strategy": "dp(2, via=ps(1))",
        "under": "dp(2, via=ps(1))",
        "at": 3,
        "steps": 6,
        "folder": str(tmp_path),
    }
    rows = ranks("distributed.server_targets:forgets_state", asked, ranks=3)
    assert max(row["difference"] for row in rows) > 1e-6


LOOSE = str(Path(__file__).parent / "jobs" / "loose.py")
KILLED = "distributed.server_targets:killed_worker"


def disturbed(
    ranks: Ranks, tmp_path: Path, strategy: str, rows: list[Any], *, target: str = KILLED, **options: Any
) -> Any:
    chosen = parse(strategy)
    asked = {
        "job": LOOSE,
        "strategy": strategy,
        "folder": str(tmp_path / "run"),
        "gate": False,
        "checkpoint_every": 11,
        "disturbed": rows,
        **options,
    }
    return ranks(target, asked, ranks=chosen.world, islands=losable(chosen))


@pytest.mark.parametrize(
    "strategy",
    [
        "dp(3, sync=asp(), via=ps(1))",
        "dp(3, sync=ssp(2), via=ps(1))",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "dp(3, sync=softsync(1), via=ps(1))",
                "dp(3, sync=bsp(backup=1), via=ps(1))",
                "dp(3, sync=asp(), via=ps(1, colocated=True))",
            )
        ),
    ],
)
def test_a_killed_worker_does_not_stop_the_others(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    results = disturbed(ranks, tmp_path, strategy, [(2, "step: backward done", 10, None)])
    assert results[2] is None
    assert results[0]["status"] == "finished"
    assert results[0]["step"] == 22
    lost = results[0]["servers"]["lost_workers"]
    assert [row["worker"] for row in lost] == [2]
    assert results[0]["lost"][0]["ranks"] == [2]
    if "asp" in strategy or "softsync" in strategy:
        assert results[0]["servers"]["gradients"] == 3 * 22  # Every ticket was learned from, the lost one by another.
        assert results[0]["servers"]["repeated"] <= 1
    assert read_json(tmp_path / "run" / RUN)["summary"]["servers"]["lost_workers"] == lost


def test_a_worker_may_be_killed_before_the_first_rank_is_ready(ranks: Ranks, tmp_path: Path) -> None:
    strategy, early = "dp(3, sync=asp(), via=ps(1, colocated=True))", "distributed.server_targets:killed_early"
    results = disturbed(ranks, tmp_path, strategy, [(2, "step: backward done", 1, None)], target=early)
    assert results[0]["status"] == "finished"
    assert [row["worker"] for row in results[0]["servers"]["lost_workers"]] == [2]


@pytest.mark.parametrize("s", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, 3, 10))])
def test_a_straggler_is_never_left_behind_by_more_than_the_bound(ranks: Ranks, tmp_path: Path, s: int) -> None:
    strategy = f"dp(3, sync=ssp({s}), via=ps(1))"
    outcome = disturbed(ranks, tmp_path, strategy, [(2, "step: forward", 0, 0.02)], evaluate_every=0)[0]
    ahead = outcome["consistency"]["ahead"]
    assert ahead["max"] == s  # Reached, and at none of all reads exceeded.
    assert sum(ahead["histogram"].values()) == 3 * 22
    assert outcome["consistency"]["staleness"]["max"] <= s
