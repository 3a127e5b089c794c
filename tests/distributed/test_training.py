"""Whole runs on real ranks: every strategy follows the serial curve, sends what was predicted, and ends as asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.training_targets import curve
from shoal.comm.ledger import Ledger
from shoal.launch import RankHung
from shoal.strategy import parse
from shoal.training.entry import train_run

Ranks = Callable[..., list[Any]]

TRAIN = train_run
STEPS = 8
STRATEGIES = [
    "dp(2)",
    "dp(3, zero=1)",
    "dp(2, zero=2) * accumulate(3)",
    "dp(2, zero=3) * recompute('full')",
    "dp(2) * dp(2, zero=3)",
]


def train(ranks: Ranks, folder: Path, strategy: str, *, job: str = "language:tiny", **changes: Any) -> dict[str, Any]:
    arguments = {"job": job, "steps": STEPS, "strategy": strategy, "folder": str(folder), "gate": False, **changes}
    outcome: dict[str, Any] = ranks(TRAIN, arguments, ranks=parse(strategy).world)[0]
    return outcome


@pytest.mark.parametrize("job", ["language:tiny", "image:vgg:tiny", "image:resnet:tiny"])
def test_every_strategy_follows_the_serial_curve_and_sends_what_was_predicted(
    job: str, ranks: Ranks, tmp_path: Path
) -> None:
    serial = train(ranks, tmp_path / "serial", "serial", job=job)
    losses = [loss for _, loss in curve(tmp_path / "serial")]
    assert len(set(losses)) == STEPS
    assert serial["ledger"] == serial["predicted"] == []
    for strategy in STRATEGIES:
        if job != "language:tiny" and "accumulate" in strategy:
            continue  # Batch norm sees micro-batches: the contract is not exact there.
        folder = tmp_path / str(STRATEGIES.index(strategy))
        outcome = train(ranks, folder, strategy, job=job)
        assert [loss for _, loss in curve(folder)] == pytest.approx(losses, rel=2e-3), strategy
        assert outcome["metrics"] == pytest.approx(serial["metrics"], rel=0.05), strategy
        counted, predicted = Ledger.from_json(outcome["ledger"]), Ledger.from_json(outcome["predicted"])
        assert counted.differences(predicted) == [], strategy
        assert counted.bytes > 0, strategy


def test_the_same_run_twice_is_the_same_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(ranks, tmp_path / name, "dp(2, zero=3)")
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    train(ranks, tmp_path / "other", "dp(2, zero=3)", seed=1)
    assert curve(tmp_path / "other") != curve(tmp_path / "one")


def test_bf16_follows_float32_from_afar(ranks: Ranks, tmp_path: Path) -> None:
    train(ranks, tmp_path / "float32", "dp(2)")
    train(ranks, tmp_path / "bf16", "dp(2) * amp('bf16')")
    wide, narrow = ([loss for _, loss in curve(tmp_path / name)] for name in ("float32", "bf16"))
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.02)


TARGET = """
from dataclasses import replace
from shoal.job import Target, load_job
target = Target(metric="loss", value=4.9)
job = replace(load_job("language:tiny"), name="easy", steps=40, evaluate_every=5, target=target)
"""


@pytest.mark.parametrize("full", [False, True])
def test_training_ends_at_the_target_unless_asked_to_go_on(full: bool, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "easy.py").write_text(TARGET)
    easy = {"job": str(tmp_path / "easy.py"), "steps": None, "stop_at_target": not full, "checkpoint_every": 10}
    outcome = train(ranks, tmp_path / "run", "dp(2)", **easy)
    reached = outcome["steps_to_target"]
    assert reached in (5, 10, 15, 20, 25)
    assert 0 < outcome["time_to_target_s"] <= outcome["train_s"]
    assert outcome["step"] == (40 if full else reached)
    assert outcome["status"] == "finished"
    metrics = dict(curve(tmp_path / "run", "validation.jsonl"))
    assert metrics[reached]["loss"] <= 4.9
    assert all(values["loss"] > 4.9 for step, values in metrics.items() if step < reached)
    assert (tmp_path / "run" / "checkpoints" / f"step-{outcome['step']:08d}").is_dir()


LATE = """
import os, time
from dataclasses import replace
from shoal.job import load_job
base = load_job("language:tiny")
def schedule(step):
    if step == 3 and os.environ["RANK"] == "1":
        time.sleep(600)
    return 1.0
job = replace(base, name="late", schedule=schedule)
"""


def test_a_rank_that_hangs_in_training_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    arguments = {"job": str(tmp_path / "late.py"), "strategy": "dp(2)", "folder": str(tmp_path / "run"), "gate": False}
    start_s = time.monotonic()
    with pytest.raises(RankHung, match="rank 1 is late: it has not entered") as raised:
        ranks(TRAIN, arguments, ranks=2, hang_after_s=1.5)
    assert raised.value.rank == 1
    assert "late.py:8 in schedule" in str(raised.value)
    assert time.monotonic() - start_s < 20
