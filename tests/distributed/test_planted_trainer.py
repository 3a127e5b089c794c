"""What a trainer does besides its steps, each compared with plain PyTorch or a list made by hand, and wrong trainers
that fail the same comparison."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import overflow_jobs, trainer_faults, trainer_jobs
from shoal import load_run, parse
from shoal.checkpoint.rows import CheckpointBroken
from shoal.training.entry import train_run

Weights = dict[str, torch.Tensor]
Train = Callable[..., dict[str, Any]]
"""Trains a job by its name, with options of `shoal train`, and gives rank 0's outcome."""

by_hand = cache(lambda lr=0.1: trainer_jobs.by_hand(trainer_jobs.job(lr=lr), lr=lr))


def differ(found: Weights, expected: Weights) -> float:
    return max(float((found[name] - values).abs().max()) for name, values in expected.items())


def check_average(train: Train, folder: Path) -> None:
    outcome = train("averaged", checkpoint_every=4)
    weights, average = trainer_jobs.average_by_hand(4, 0.5)
    assert differ(load_run(folder).model().state_dict(), weights) < 2e-6
    assert differ(load_run(folder).model(ema=True).state_dict(), average) < 2e-6
    expected = trainer_jobs.validation_loss(trainer_jobs.averaged(), average)
    assert outcome["metrics"]["ema_loss"] == pytest.approx(expected, rel=1e-5)


def check_patience(train: Train, folder: Path) -> None:
    # The first evaluation, after step 2, is the record; those after steps 4 and 6 do not improve on it.
    assert train("not_learning", patience=2)["step"] == 6


def check_best(train: Train, folder: Path) -> None:
    outcome = train("plain", keep_best=2, keep=1, checkpoint_every=12, monitor="loss", better="higher")
    losses = {step: trainer_jobs.validation_loss(trainer_jobs.plain(), by_hand()[step]) for step in range(2, 14, 2)}
    best = sorted(losses, key=losses.__getitem__, reverse=True)[:2]
    assert outcome["best"] == [{"step": step, "loss": pytest.approx(losses[step], rel=1e-5)} for step in best]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step-{step:08d}" for step in (*best, 12)}
    for step in best:
        assert differ(load_run(folder).model(step=step).state_dict(), by_hand()[step]) < 2e-6


def check_background(train: Train, folder: Path) -> None:
    train("plain", checkpoint_every=4, checkpoint_async=True, keep=4)
    for step in (4, 8, 12):
        assert differ(load_run(folder).model(step=step).state_dict(), by_hand()[step]) < 2e-6


def check_callbacks(train: Train, folder: Path) -> None:
    train("traced", checkpoint_every=2)
    called = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    step, evaluate, checkpoint = ((f"on_{event}",) for event in ("step", "evaluate", "checkpoint"))
    order = [(*step, 1), (*step, 2), (*evaluate, 2), (*checkpoint, 2)]
    order += [(event, number + 2) for event, number in order]
    assert [tuple(row[:2]) for row in called] == order
    assert all(row[2] for row in called if row[0] == "on_checkpoint")


def check_settings(train: Train, folder: Path) -> None:
    train("plain", set={"lr": 0.02}, steps=4, checkpoint_every=4)
    assert differ(load_run(folder).model().state_dict(), by_hand(0.02)[4]) < 2e-6


def check_scale(train: Train, folder: Path) -> None:
    train(
        "overflowing",
        file=overflow_jobs.__file__,
        strategy="pp(2, 'gpipe', micro=2) * amp('fp16')",
        checkpoint_every=overflow_jobs.STEPS,
    )
    overflow_jobs.compare(folder)


Check = Callable[[Train, Path], None]
CHECKS: dict[Check, Any] = {
    check_average: train_run,
    check_patience: train_run,
    check_best: train_run,
    check_background: trainer_jobs.train_with_a_slow_disk,
    check_callbacks: train_run,
    check_settings: train_run,
    check_scale: overflow_jobs.train_with_a_scale_that_grows_soon,
}
"""Each with the honest trainer."""
FAULTS: list[tuple[Check, trainer_faults.Target]] = [
    (check_average, trainer_faults.averages_the_weights_before_the_update),
    (check_average, trainer_faults.evaluates_the_weights_as_the_average),
    (check_patience, trainer_faults.is_patient_for_one_evaluation_more),
    (check_patience, trainer_faults.is_patient_for_one_evaluation_less),
    (check_best, trainer_faults.takes_the_worst_for_the_best),
    (check_best, trainer_faults.saves_the_best_one_step_late),
    (check_background, trainer_faults.writes_in_the_background_what_training_changes),
    (check_callbacks, trainer_faults.calls_back_for_a_step_after_its_evaluation),
    (check_callbacks, trainer_faults.calls_back_before_the_checkpoint_is_written),
    (check_settings, trainer_faults.ignores_settings),
    (check_scale, trainer_faults.clips_scaled_gradients),
    (check_scale, trainer_faults.skips_by_its_own_norm),
    (check_scale, trainer_faults.counts_a_skipped_step_as_good),
    (check_scale, trainer_faults.trains_on_what_overflowed),
]


@pytest.fixture
def trained(ranks: Callable[..., list[Any]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def train(
        target: Any, job: str, *, file: str = trainer_jobs.__file__, strategy: str = "dp(2, zero=1)", **options: Any
    ) -> dict[str, Any]:
        arguments = {"job": f"{file}:{job}", "strategy": strategy, "folder": str(tmp_path), "gate": False, **options}
        outcome: dict[str, Any] = ranks(target, arguments, ranks=parse(strategy).world)[0]
        return outcome

    return train


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_honest_trainer_agrees(trained: Callable[..., dict[str, Any]], tmp_path: Path, check: Check) -> None:
    check(partial(trained, CHECKS[check]), tmp_path)


@pytest.mark.parametrize(("check", "fault"), FAULTS, ids=lambda each: each.__name__)
def test_a_planted_fault_is_found(
    trained: Callable[..., dict[str, Any]], tmp_path: Path, check: Check, fault: trainer_faults.Target
) -> None:
    with pytest.raises((AssertionError, CheckpointBroken)):
        check(partial(trained, fault), tmp_path)
