"""What no checkpoint can hold is reported before the first step, in a sentence."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.optimizer_zoo import WithoutRate, Written
from shoal.checkpoint.save import CheckpointFailed, open_checkpoint, require_savable, restore, save
from shoal.job import Job, JobError, TensorData
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse


class Seen(Written):
    """Keeps a set."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.seen: set[float] = set()

    def begin(self) -> None:
        self.seen = self.seen | {float(len(self.seen))}

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad)


class Hooked(torch.optim.SGD):
    """Counts in a hook's closure, where no checkpoint finds it."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        calls = [0]

        def hook(*_: Any) -> None:
            calls[0] += 1
            for group in self.param_groups:
                group["weight_decay"] = 0.1 / calls[0]

        self.register_step_pre_hook(hook)


class Aliased(Written):
    """Keeps one tensor under two names."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param))
        same = state.setdefault("same", mean)
        mean.lerp_(param.grad, 0.1)
        param.sub_(group["lr"] * same)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.turn).abs()


def ready(optimizer: Any, model: Any = lambda: nn.Linear(3, 4), **options: Any) -> Prepared:
    job = Job(
        name="savable",
        model=model,
        train=TensorData(x=torch.ones(4, 3)),
        optimizer=optimizer,
        global_batch=2,
        steps=3,
        loss=lambda out, batch: (out.square().sum(), len(out)),
        **options,
    )
    return prepare(job, parse("dp(1)"), rank=0, backend=None)


def test_an_object_that_a_checkpoint_cannot_hold_is_named() -> None:
    run = ready(Seen)
    with pytest.raises(CheckpointFailed) as refused:
        require_savable(run.engine, run.optimizer)
    assert str(refused.value) == (
        "no checkpoint of this job can be written: Seen keeps a set (attributes: 'seen'), and a checkpoint holds "
        "numbers, text, lists, dicts and tensors; keep it as one of these, or train without checkpoints "
        "(--checkpoint-every 0)"
    )


@pytest.mark.parametrize("optimizer", [Hooked, Aliased])
def test_what_would_be_lost_in_a_resume_is_found_by_a_resume_in_memory(optimizer: Any) -> None:
    run = ready(optimizer)
    with pytest.raises(CheckpointFailed) as refused:
        require_savable(run.engine, run.optimizer)
    assert str(refused.value) == (
        f"no checkpoint of this job can be written: {optimizer.__name__} was rebuilt in the middle of a trial from all "
        "that a checkpoint holds of it, and its next steps differed. It keeps something outside its state, its "
        "groups and its attributes (in a hook, a closure or a global), or one tensor in two places; keep it there, "
        "once, or train without checkpoints (--checkpoint-every 0)"
    )


def test_a_parameter_of_a_type_that_a_checkpoint_cannot_hold_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 4)
            self.register_buffer("odd", torch.zeros(2, dtype=torch.float8_e4m3fn))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    run = ready(partial(torch.optim.SGD, lr=0.1), Odd)
    with pytest.raises(CheckpointFailed, match="written: odd has dtype float8_e4m3fn, which a checkpoint cannot"):
        require_savable(run.engine, run.optimizer)


def test_complex_parameters_and_their_state_are_saved(tmp_path: Path) -> None:
    run, other = (ready(partial(torch.optim.AdamW, lr=0.1), Turning) for _ in range(2))
    require_savable(run.engine, run.optimizer)
    run.runner.step(0, 0)
    path = save(tmp_path, run.engine, step=1, progress={})
    checkpoint = open_checkpoint(path)
    assert checkpoint.read_parameter("turn", 1, 3).dtype == torch.complex64
    restore(other.engine, checkpoint)
    for each in (run, other):
        each.runner.step(1, 2)
    after, same = (each.engine.model.state_dict() for each in (run, other))
    assert all(torch.equal(after[name], same[name]) for name in after)
    assert after["turn"].imag.abs().min() > 0


def test_what_can_be_saved_passes() -> None:
    run = ready(torch.optim.Adafactor)
    require_savable(run.engine, run.optimizer)


def test_a_schedule_needs_a_learning_rate() -> None:
    ready(WithoutRate)
    with pytest.raises(JobError) as refused:
        ready(WithoutRate, schedule=lambda step: 1.0 / (1 + step))
    assert str(refused.value) == (
        "job 'savable': WithoutRate has no learning rate ('lr') in its groups, so the schedule cannot change it; leave "
        "Job.schedule out, or name the optimiser's learning rate 'lr'"
    )


def test_the_users_own_tensor_learning_rate_is_left_alone() -> None:
    rate = torch.tensor(0.5)
    run = ready(lambda groups: torch.optim.SGD(groups, lr=rate), schedule=lambda step: 0.5 ** (step + 1))
    for step in range(3):
        run.runner.step(step, step * 2)
    assert float(rate) == 0.5
    assert float(run.engine.optimizer.optimizer.param_groups[0]["lr"]) == 0.5 * 0.125
