"""Killed at any moment and resumed, a run ends where the undisturbed one does, to the bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.training_targets import checkpoint_bytes, curve
from shoal.launch import RankFailed
from shoal.strategy import parse

Ranks = Callable[..., list[Any]]

TRAIN = "distributed.training_targets:train_and_tell_pid"
STEPS = 40
LAST_KILL = 28
KILLS = {"serial": 3, "dp(2)": 5, "dp(2, zero=1)": 4, "dp(2, zero=3) * accumulate(2)": 5, "dp(2) * dp(2, zero=2)": 3}
"""How often each run is killed: twenty times in all."""


def arguments(folder: Path, strategy: str, **changes: Any) -> dict[str, Any]:
    common = {"job": "language:tiny", "steps": STEPS, "evaluate_every": 7, "checkpoint_every": 3, "gate": False}
    return {**common, "strategy": strategy, "folder": str(folder), **changes}


class Killer:
    """Kills ranks when rank 0 tells of a certain step, and a random moment later."""

    def __init__(self, *, step: int, chance: random.Random) -> None:
        self.step, self.chance = step, chance
        self.pids: dict[int, int] = {}
        self.killed = False

    def message(self, rank: int, message: dict[str, Any]) -> None:
        if message["event"] == "process":
            self.pids[rank] = message["pid"]
        if message["event"] == "step" and message["step"] >= self.step and not self.killed:
            self.killed = True
            # Steps take some ten milliseconds: within one, between two, or while a checkpoint is written.
            time.sleep(self.chance.uniform(0, 0.03))
            victims = self.pids.values() if self.chance.random() < 0.5 else [self.chance.choice([*self.pids.values()])]
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def resume_from(folder: Path) -> dict[str, Any]:
    """The run goes on if there is a checkpoint yet, and starts anew in place if not."""
    if any((folder / "checkpoints").glob("step-*[0-9]")):
        return {"resume": str(folder)}
    (folder / "run.json").unlink(missing_ok=True)
    (folder / "steps.jsonl").unlink(missing_ok=True)
    return {}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("strategy", KILLS)
def test_killed_at_random_and_resumed_it_ends_in_the_same_bits(
    strategy: str, seed: int, ranks: Ranks, tmp_path: Path
) -> None:
    world, chance = parse(strategy).world, random.Random(f"{strategy} {seed}")
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    expected = ranks(TRAIN, arguments(undisturbed, strategy), ranks=world)[0]
    assert expected["status"] == "finished"

    changes: dict[str, Any] = {}
    for step in sorted(chance.sample(range(2, LAST_KILL), KILLS[strategy])):
        killer = Killer(step=step, chance=chance)
        with pytest.raises(RankFailed, match="was killed by SIGKILL"):
            ranks(TRAIN, arguments(disturbed, strategy, **changes), ranks=world, on_message=killer.message)
        changes = resume_from(disturbed)
    outcome = ranks(TRAIN, arguments(disturbed, strategy, **changes), ranks=world)[0]

    assert outcome["loss"] == expected["loss"]
    assert outcome["metrics"] == expected["metrics"]
    assert curve(disturbed) == curve(undisturbed)
    assert curve(disturbed, "validation.jsonl") == curve(undisturbed, "validation.jsonl")
    state = checkpoint_bytes(undisturbed, STEPS)
    assert len(state) > 10
    assert checkpoint_bytes(disturbed, STEPS) == state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp(2, zero=3)", "serial"),
        ("serial", "dp(2, zero=1)"),
        ("dp(2)", "dp(2) * dp(2, zero=3)"),
        ("dp(3, zero=2)", "dp(2)"),
    ],
)
def test_resumed_under_another_strategy_the_curve_goes_on(
    before: str, after: str, ranks: Ranks, tmp_path: Path
) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    first, second = parse(before).world, parse(after).world
    ranks(TRAIN, arguments(whole, before), ranks=first)
    ranks(TRAIN, arguments(moved, before, steps=STEPS // 2), ranks=first)
    at = curve(moved)
    ranks(TRAIN, arguments(moved, after, resume=str(moved)), ranks=second)
    assert curve(moved)[: len(at)] == at == curve(whole)[: len(at)]
    assert [step for step, _ in curve(moved)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in curve(moved)] == pytest.approx([loss for _, loss in curve(whole)], rel=1e-4)


def test_an_evaluation_that_a_stop_came_before_is_made_up_for(ranks: Ranks, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    ranks(TRAIN, arguments(whole, "dp(2)"), ranks=2)
    asked = arguments(stopped, "dp(2)", stop_at=7)
    outcome = ranks("distributed.training_targets:train_until", asked, ranks=2)[0]
    assert (outcome["status"], outcome["step"]) == ("stopped", 7)
    assert curve(stopped, "validation.jsonl") == []
    ranks(TRAIN, arguments(stopped, "dp(2)", resume=str(stopped)), ranks=2)
    assert curve(stopped, "validation.jsonl") == curve(whole, "validation.jsonl")
    assert curve(stopped) == curve(whole)


def test_a_stop_with_the_last_step_is_the_end(ranks: Ranks, tmp_path: Path) -> None:
    asked = arguments(tmp_path / "run", "dp(2)", stop_at=STEPS)
    outcome = ranks("distributed.training_targets:train_until", asked, ranks=2)[0]
    assert (outcome["status"], outcome["step"]) == ("finished", STEPS)
    assert outcome["metrics"]["loss"] > 0
