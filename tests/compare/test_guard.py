"""The guard catches each way of not training the same job, by name, from what the protocol itself saw."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from compare.unfair import FAULTS
from shoal.compare.guard import Seen, judge, one_sided, student_tail
from shoal.launch import run_ranks
from shoal.training.record.run import read_run

STEPS = 10


def seen(folder: Path, facts: list[dict[str, Any]]) -> Seen:
    run = read_run(folder)
    return Seen(seed=0, losses=run.losses, step_s=[row["step_s"] for row in run.steps], ranks=facts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("compare")
    settings = {"job": "language:tiny", "changes": {"steps": STEPS, "evaluate_every": 0}, "folder": str(folder)}
    unfair = [f"unfair-{fault.replace(' ', '-')}" for fault in FAULTS]
    found = {}
    for ranks, names in ((1, ["pytorch"]), (2, ["torch-ddp", "torch-fsdp2", *unfair])):
        target = "compare.compare_targets:contestants"
        rows = run_ranks(target, {**settings, "names": names}, ranks=ranks, hang_after_s=60)
        for name in names:
            found[name] = seen(folder / name, [row[name] for row in rows])
    return found


def names_of(trained: dict[str, Seen], name: str) -> set[str]:
    found = judge([trained[name]], [trained["pytorch"]], exact=True, follows=True, warmup=3)
    return {each.name for each in found if each.kind == "breach"}


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_fair_frameworks_pass(trained: dict[str, Seen]) -> None:
    assert names_of(trained, "torch-ddp") == set()
    assert names_of(trained, "torch-fsdp2") == set()


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_name(trained: dict[str, Seen], fault: str) -> None:
    assert FAULTS[fault] in names_of(trained, f"unfair-{fault.replace(' ', '-')}")


def run(seed: int, final: float, noise: float = 0.01) -> Seen:
    draw = random.Random(seed)
    losses = [5.0, *(final + draw.gauss(0, noise) for _ in range(40))]
    optimizers = [{"class": "SGD", "options": [{"momentum": 0.9}], "state": ["float32"], "parameters": ["float32"]}]
    facts = {"samples": [[4, "1"]] * 41, "start": {}, "end": {}, "optimizers": optimizers, "compiled": [0] * 41}
    return Seen(seed=seed, losses=losses, step_s=[0.01] * 41, ranks=[facts])


def verdicts(ours: list[Seen], theirs: list[Seen]) -> list[str]:
    return [each.name for each in judge(ours, theirs, exact=False, follows=False, warmup=3)]


def test_the_band_is_over_seeds_and_in_both_directions() -> None:
    reference = [run(seed, 2.0) for seed in range(4)]
    assert verdicts([run(seed, 2.0) for seed in range(4)], reference) == []
    assert verdicts([run(seed, 2.01) for seed in range(4)], reference) == []
    assert verdicts([run(seed, 2.2) for seed in range(4)], reference) == ["loss-band"]
    assert verdicts([run(seed, 1.8) for seed in range(4)], reference) == ["too-well"]
    assert verdicts([run(0, float("nan"))], reference) == ["loss"]
    # A difference within the spread of the seeds is none.
    spread = [run(seed, 2.0 + 0.3 * seed) for seed in range(4)]
    assert verdicts([run(seed, 2.1 + 0.3 * seed) for seed in range(4)], spread) == []


def test_one_step_that_is_slow_in_every_run_is_not_the_machine() -> None:
    reference = [run(seed, 2.0) for seed in range(3)]
    slow = [0.01] * 41
    slow[7] = 2.0
    late = [Seen(seed=each.seed, losses=each.losses, step_s=slow, ranks=each.ranks) for each in reference]
    assert verdicts(late, reference) == ["compilation"]
    assert verdicts([late[0], *reference[1:]], reference) == []


TABLE = [(0.0, 5, 0.5), (2.015, 5, 0.05), (3.365, 5, 0.01), (6.314, 1, 0.05)]


@pytest.mark.parametrize(("t", "freedom", "tail"), TABLE)
def test_students_tail_is_that_of_the_tables(t: float, freedom: float, tail: float) -> None:
    assert student_tail(t, freedom) == pytest.approx(tail, rel=2e-3)


def test_without_a_spread_there_is_no_test() -> None:
    assert one_sided([1.0], [2.0]) is None
