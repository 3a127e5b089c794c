"""Slowed and killed ranks on real ones: who waits for a straggler, and who goes on without a killed island."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.strategy import parse
from shoal.strategy.islands import islands
from shoal.training.record.run import RUN, read_json

Ranks = Callable[..., list[Any]]
LOOSE = str(Path(__file__).parent / "jobs" / "loose.py")
TRAIN = "shoal.training.entry:train_run"


def trained(ranks: Ranks, folder: Path, strategy: str, **options: Any) -> Any:
    """Rank 0's outcome."""
    chosen = parse(strategy)
    asked = {"job": LOOSE, "strategy": strategy, "folder": str(folder), "gate": False, "checkpoint_every": 0}
    return ranks(TRAIN, {**asked, **options}, ranks=chosen.world, islands=islands(chosen))[0]


def step_times(folder: Path) -> list[float]:
    return [json.loads(line)["step_s"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_bsp_waits_for_a_straggler_in_every_step_and_islands_when_they_average(ranks: Ranks, tmp_path: Path) -> None:
    # Sleeps, so that the machine may be busy: 20 ms of emulated computing, three times as much on rank 2.
    slow = "all: 20 ms; rank 2: 3x"
    trained(ranks, tmp_path / "even", "dp(3)", straggler="all: 20 ms")
    trained(ranks, tmp_path / "bsp", "dp(3)", straggler=slow)
    trained(ranks, tmp_path / "local", "dp(3, sync=local(11))", straggler=slow)
    even, bsp, local = (step_times(tmp_path / name) for name in ("even", "bsp", "local"))
    assert min(even) < 0.055 < min(bsp[1:]), "some step did not wait for the straggler"
    between = [seconds for number, seconds in enumerate(local, 1) if number % 11]
    assert min(between) < 0.055, "islands wait for a straggler between two averages"
    assert max(local[10], local[21]) > 10 * 0.025, "nothing waited for the straggler's model"
    assert read_json(tmp_path / "bsp" / RUN)["arguments"]["straggler"] == slow


def test_islands_go_on_without_the_one_that_fails(ranks: Ranks, tmp_path: Path) -> None:
    found = trained(ranks, tmp_path / "run", "dp(3, sync=local(4))", fail="rank 2 at step 6")
    assert (found["status"], found["step"]) == ("finished", 22)
    assert [(loss["ranks"], loss["step"]) for loss in found["lost"]] == [([2], 8)]
    assert read_json(tmp_path / "run" / RUN)["arguments"]["fail"] == "rank 2 at step 6"
