"""Wrong trainers, planted on purpose: each function breaks what a trainer does besides its steps, then trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shoal.runtime.setup as setup
from distributed.overflow_jobs import train_with_a_scale_that_grows_soon
from distributed.trainer_jobs import train_with_a_slow_disk
from shoal.checkpoint.background import Copies
from shoal.parallel.average import WeightAverage
from shoal.parallel.engine import Engine
from shoal.parallel.loss_scale import LossScale
from shoal.training.callbacks import Callbacks
from shoal.training.entry import train_run
from shoal.training.monitor import Monitor
from shoal.training.saving import Saving

Target = Callable[[dict[str, Any], Any], dict[str, Any]]


def averages_the_weights_before_the_update(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """The average lags one step behind."""
    update, before = WeightAverage.update, {}

    def faulty(self: WeightAverage) -> None:
        masters = self.owner.masters
        now = [master.detach().clone() for master in masters]
        lagging = before.setdefault("values", [value.clone() for value in self.values])
        for master, old in zip(masters, lagging, strict=True):
            master.detach().copy_(old)
        update(self)
        for master, new in zip(masters, now, strict=True):
            master.detach().copy_(new)
        before["values"] = now

    WeightAverage.update = faulty
    return train_run(arguments, channel)


def evaluates_the_weights_as_the_average(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    @contextmanager
    def faulty(self: WeightAverage) -> Iterator[None]:
        yield

    WeightAverage.in_place = faulty
    return train_run(arguments, channel)


def is_patient_for_one_evaluation_more(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    honest = Monitor.exhausted.fget

    def faulty(self: Monitor) -> str | None:
        self.waited -= 1
        found = honest(self)
        self.waited += 1
        return found

    Monitor.exhausted = property(faulty)
    return train_run(arguments, channel)


def is_patient_for_one_evaluation_less(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    honest = Monitor.exhausted.fget

    def faulty(self: Monitor) -> str | None:
        self.waited += 1
        found = honest(self)
        self.waited -= 1
        return found

    Monitor.exhausted = property(faulty)
    return train_run(arguments, channel)


def takes_the_worst_for_the_best(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    honest = Monitor.update

    def faulty(self: Monitor, step: int, metrics: dict[str, float]) -> bool:
        return honest(self, step, {name: -value for name, value in metrics.items()})

    Monitor.update = faulty
    return train_run(arguments, channel)


def saves_the_best_one_step_late(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    honest, late = Saving.after_step, {}

    def faulty(self: Saving) -> bool:
        wanted, self.wanted = self.wanted, late.get("wanted", False)
        late["wanted"] = wanted
        return honest(self)

    Saving.after_step = faulty
    return train_run(arguments, channel)


def writes_in_the_background_what_training_changes(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """An asynchronous checkpoint without a copy: it holds the weights after the next update."""
    Copies.of = lambda self, tensors: [(name, tensor.detach()) for name, tensor in tensors]
    return train_with_a_slow_disk(arguments, channel)


def calls_back_for_a_step_after_its_evaluation(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    step, evaluated, late = Callbacks.step, Callbacks.evaluated, []

    def later(self: Callbacks, row: dict[str, Any]) -> None:
        if row["step"] % 2:
            step(self, row)
        else:
            late.append(row)

    def faulty(self: Callbacks) -> bool:
        stop = evaluated(self)
        while late:
            step(self, late.pop())
        return stop

    Callbacks.step, Callbacks.evaluated = later, faulty
    return train_run(arguments, channel)


def calls_back_before_the_checkpoint_is_written(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    save, saved = Saving.save, Callbacks.saved

    def faulty(self: Saving, *, final: bool) -> bool:
        path = Path(self.run.folder) / "checkpoints" / f"step-{self.run.step:08d}"
        return saved(self.run.callbacks, path) | save(self, final=final)

    Callbacks.saved = lambda self, path: False
    Saving.save = faulty
    return train_run(arguments, channel)


def ignores_settings(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    setup.overridden = lambda job, given: job
    return train_run(arguments, channel)


def clips_scaled_gradients(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Clips before the gradient is divided by the loss scale."""
    scale = Engine.scale

    def faulty(self: Engine, count: float, *more: Any) -> float:
        factor = 1.0 if self.scale_of_loss is None else self.scale_of_loss.factor
        norm = scale(self, count / factor, *more)
        for bucket in self.buckets:
            bucket.reduced().div_(factor)
        return norm / factor

    Engine.scale = faulty
    return train_with_a_scale_that_grows_soon(arguments, channel)


def skips_by_its_own_norm(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Each rank decides by its own part of the gradient whether it overflowed."""
    scale, all_reduce = Engine.scale, dist.all_reduce

    def faulty(self: Engine, count: float, *more: Any) -> float:
        dist.all_reduce = lambda tensor, group=None: all_reduce(tensor.clone(), group=group)
        try:
            return scale(self, count, *more)
        finally:
            dist.all_reduce = all_reduce

    Engine.scale = faulty
    return train_with_a_scale_that_grows_soon(arguments, channel)


def counts_a_skipped_step_as_good(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """An overflow halves the scale, but does not begin the count of good steps again."""
    passed = LossScale.passed

    def faulty(self: LossScale, *numbers: float) -> bool:
        before = self.good_steps
        good = passed(self, *numbers)
        if not good:
            self.good_steps = before
        return good

    LossScale.passed = faulty
    return train_with_a_scale_that_grows_soon(arguments, channel)


def trains_on_what_overflowed(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Gradients that overflowed are set to zero, and the step is made."""
    scale = Engine.scale

    def faulty(self: Engine, count: float, *more: Any) -> float:
        for bucket in self.buckets:
            torch.nan_to_num_(bucket.reduced(), nan=0.0, posinf=0.0, neginf=0.0)
        return scale(self, count, *more)

    Engine.scale = faulty
    return train_with_a_scale_that_grows_soon(arguments, channel)
