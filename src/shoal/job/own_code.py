"""Runs the user's code (model, data, loss, metrics) once, before ranks start. An error there is reported with the line
of the user's file. Errors that would appear only at the first evaluation, and jobs that train nothing, are found before
the first step.
"""

from __future__ import annotations

import random
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.job.errors import JobError, did_you_mean
from shoal.job.job import Batch, Data, Job

NOT_THE_USERS = tuple(
    str(Path(place).resolve()) for place in (str(Path(__file__).parents[1]), *sysconfig.get_paths().values())
)
"""Folders of code that the user did not write: Shoal, the standard library, installed packages."""


@contextmanager
def naming_the_line(job: Job, doing: str, batch: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Wraps a call of the job's code: turns any exception into a JobError that names the user's line."""
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        if getattr(error, "for_user", isinstance(error, ValueError) and type(error).__module__.startswith("shoal.")):
            raise
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not str(Path(frame.filename).resolve()).startswith(NOT_THE_USERS) and Path(frame.filename).is_file()
        ]
        where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        source = f"\n    {own[-1].line}" if own and own[-1].line else ""
        held = f" (it is given {', '.join(map(repr, batch))})" if isinstance(error, KeyError) and batch else ""
        raise JobError(f"job {job.name!r}: {doing} raised {what}{held}{where}{source}") from error


def built(job: Job) -> nn.Module:
    """The job's model; a JobError says why it cannot be built."""
    with naming_the_line(job, "building the model"):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(
            f"job {job.name!r}: model() returned a {type(model).__name__}, but must return an nn.Module: write "
            "model=MyModel, or model=lambda: MyModel(...)"
        )
    return model


def require_runs(job: Job, *, samples: int, autocast: torch.dtype | None = None) -> list[str] | None:
    """Runs forward, loss, validation and metrics once on the CPU. Random states are as they were before.

    Args:
        job: Its model is built anew.
        samples: How many samples a rank computes at once.
        autocast: What training multiplies in, where that is not the model's own precision.

    Returns:
        The names of the validation values; None without validation data.

    Raises:
        JobError: Some part of the job fails, or trains nothing; the text names it.
    """
    values: list[str] | None = None
    states = random.getstate(), np.random.get_state()
    precision: Any = torch.autocast("cpu", autocast) if autocast is not None else nullcontext()
    try:
        with torch.random.fork_rng(devices=[]), precision:
            torch.manual_seed(job.seed)
            model = built(job)
            if not any(param.requires_grad for param in model.parameters()):
                raise JobError(f"job {job.name!r}: there is nothing to train: no parameter requires a gradient")
            indices = job.order().indices(0)[: max(1, samples)]
            try:
                # Only whether there is a gradient is asked: what backward would need is let go at once.
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda kept: kept):
                    _require_trains(job, model, indices)
            except JobError:
                # A forward that differentiates (a gradient penalty) needs what it has saved, and torch.func allows no
                # such hooks: what fails for another reason fails again.
                torch.manual_seed(job.seed)
                model = built(job)
                _require_trains(job, model, indices)
            if job.validation is not None:
                values = _require_measures(job, model.eval(), max(1, samples))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return values


def _kept_names(model: nn.Module) -> list[str]:
    """Parameters, and buffers that checkpoints hold."""
    with torch.no_grad():
        held = model.state_dict(keep_vars=True)
    return [name for name, value in held.items() if isinstance(value, torch.Tensor)]


def _require_trains(job: Job, model: nn.Module, indices: np.ndarray) -> None:
    batch = _read(job, "train", job.train, indices)
    kept = _kept_names(model)
    with naming_the_line(job, "the model's forward", batch):
        output = job.run_model(model.train(), batch)
    if made := [name for name in _kept_names(model) if name not in kept]:
        raise JobError(
            f"job {job.name!r}: the model's first forward makes {', '.join(made[:3])}, of which an optimizer that is "
            "given the model's parameters before knows nothing, and which no checkpoint could give back to a new "
            "model. Make it in __init__, or run the model once before model() returns it; a cache may be a buffer "
            "with persistent=False"
        )
    with naming_the_line(job, "loss(output, batch)", batch):
        loss, count = job.loss_of(output, batch)
    if float(count) < 0:
        raise JobError(
            f"job {job.name!r}: loss returns a count of {float(count):g}; expected how many samples or tokens were "
            "summed, at least 0"
        )
    if job.steps and not loss.requires_grad:
        raise JobError(
            f"job {job.name!r}: no parameter would be trained: the loss carries no gradient. Compute it from the "
            "model's output itself, without detach(), item(), argmax or torch.no_grad()"
        )


def _require_measures(job: Job, model: nn.Module, samples: int) -> list[str]:
    assert job.validation is not None
    with torch.no_grad():
        batch = _read(job, "validation", job.validation, np.arange(min(samples, len(job.validation))))
        with naming_the_line(job, "the model's forward in validation", batch):
            output = job.run_model(model, batch)
        with naming_the_line(job, "metrics(output, batch)", batch):
            found = job.measure(output, batch)
    totals = {name: (float(total), float(count)) for name, (total, count) in found.items()}
    with naming_the_line(job, "derived", {**totals}):
        values = job.summarise(totals)
    if job.target is not None and job.target.metric not in values:
        raise JobError(
            f"job {job.name!r}: target names the validation value {job.target.metric!r}, but validation gives "
            f"{', '.join(values)}.{did_you_mean(job.target.metric, values)}"
        )
    return list(values)


def _read(job: Job, what: str, data: Data, indices: np.ndarray) -> Batch:
    with naming_the_line(job, f"{what}.batch(indices)"):
        batch = data.batch(indices)
    if not isinstance(batch, Mapping):
        raise JobError(
            f"job {job.name!r}: {what}.batch(indices) returned a {type(batch).__name__}, but must return a "
            "dictionary {name: tensor}"
        )
    return dict(batch)
