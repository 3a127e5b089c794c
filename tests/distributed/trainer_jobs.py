"""A tiny job for the tests of what a trainer does besides its steps: callbacks, early stopping, checkpoints."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.checkpoint import save as saving
from shoal.checkpoint.background import Background
from shoal.job import Job, TensorData
from shoal.runtime.step import StepRunner
from shoal.training.entry import train_run


class Log(shoal.Callback):
    """Writes down what it is called with; asks for a stop after one step."""

    def __init__(self, path: str | None, stop_at: int = 0, stop_on: str = "on_step") -> None:
        self.path, self.stop_at, self.stop_on = path, stop_at, stop_on

    def note(self, event: str, state: shoal.TrainingState) -> None:
        if self.path is None:
            return
        row = {
            "event": event,
            "step": state.step,
            "loss": state.loss,
            "metrics": dict(state.metrics),
            "pid": os.getpid(),
            "checkpoint": None if state.checkpoint is None else state.checkpoint.name,
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if event == self.stop_on and state.step == self.stop_at:
            state.stop("enough")

    def on_step(self, state: shoal.TrainingState) -> None:
        self.note("on_step", state)

    def on_evaluate(self, state: shoal.TrainingState) -> None:
        self.note("on_evaluate", state)

    def on_checkpoint(self, state: shoal.TrainingState) -> None:
        self.note("on_checkpoint", state)


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, batch["y"], reduction="sum"), len(output)


def job(lr: float = 0.1, **changes: Any) -> Job:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(64, 6, generator=draw)
    data = TensorData(x=x, y=x[:, :3].argmax(1))
    given: dict[str, Any] = {
        "name": "trainer",
        "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        "train": data,
        "validation": data,
        "loss": loss_of,
        "global_batch": 8,
        "steps": 12,
        "evaluate_every": 2,
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=lr),
        **changes,
    }
    return Job(**given)


def plain() -> Job:
    return job()


def not_learning() -> Job:
    return job(lr=0.0)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_on_a_full_disk(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The training loop; rank 1's disk is full at the checkpoint of step 4."""
    write = saving.write_tensors

    def full(path: Path, *given: Any) -> Any:
        if "step-00000004" in str(path) and path.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, *given)

    saving.write_tensors = full
    return train_run(arguments, channel)


def train_with_a_slow_disk(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The training loop; a checkpoint in the background is read only after the step that follows it."""
    sums, step, start, made = saving.of_contents, StepRunner.step, Background.start, threading.Semaphore(0)

    def begin(self: Background, *given: Any) -> None:
        while made.acquire(blocking=False):
            pass
        start(self, *given)

    def count(self: StepRunner, *given: Any) -> Any:
        result = step(self, *given)
        made.release()
        return result

    def late(*given: Any) -> Any:
        if threading.current_thread().name == "checkpoint":
            assert made.acquire(timeout=20.0)
        return sums(*given)

    StepRunner.step, Background.start, saving.of_contents = count, begin, late
    return train_run(arguments, channel)


class Trace(shoal.Callback):
    """Writes down in which order it is called, and which checkpoints it finds; in the run's folder."""

    def note(self, event: str, state: shoal.TrainingState) -> None:
        row = [event, state.step, None if state.checkpoint is None else (state.checkpoint / "SHA256SUMS").exists()]
        with open(state.folder / "calls.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def on_step(self, state: shoal.TrainingState) -> None:
        self.note("on_step", state)

    def on_evaluate(self, state: shoal.TrainingState) -> None:
        self.note("on_evaluate", state)

    def on_checkpoint(self, state: shoal.TrainingState) -> None:
        self.note("on_checkpoint", state)


def traced() -> Job:
    return job(callbacks=[Trace()], steps=4)


def by_hand(mine: Job, *, lr: float = 0.1) -> list[dict[str, torch.Tensor]]:
    """The weights after each step, the first being the start: plain PyTorch in one process."""
    torch.manual_seed(mine.seed)
    model = mine.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    found = [{name: values.clone() for name, values in model.state_dict().items()}]
    for step in range(mine.steps):
        batch = mine.train.batch(mine.order().indices(8 * step))
        optimizer.zero_grad()
        loss, count = loss_of(model(batch["x"]), batch)
        (loss / count).backward()
        optimizer.step()
        found.append({name: values.clone() for name, values in model.state_dict().items()})
    return found


def validation_loss(mine: Job, weights: dict[str, torch.Tensor]) -> float:
    model = mine.model()
    model.load_state_dict(weights)
    assert mine.validation is not None
    batch = mine.validation.batch(list(range(len(mine.validation))))
    with torch.no_grad():
        loss, count = loss_of(model(batch["x"]), batch)
    return float(loss) / count


def averaged() -> Job:
    return job(ema=0.5, steps=4, clip=1.0)


def average_by_hand(steps: int, decay: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and their moving average, by plain PyTorch in one process."""
    mine = averaged()
    torch.manual_seed(mine.seed)
    model = mine.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    average.update_parameters(model)  # The first call copies: the average begins with the start.
    for step in range(steps):
        batch = mine.train.batch(mine.order().indices(8 * step))
        optimizer.zero_grad()
        loss, count = loss_of(model(batch["x"]), batch)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
    return model.state_dict(), average.module.state_dict()


class Overflowing(nn.Linear):
    """Values that fit into 16 bits, whose scaled gradients do not at first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 300.0


def half_precision() -> Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Overflowing(16, 3))

    return job(lr=0.001, model=model, clip=1.0, steps=8)
