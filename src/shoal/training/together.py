"""What members of an ensemble predict together: the mean of their probabilities, measured by the job's own metrics.

Outputs are taken for logits where the job's metrics do not change if each row of them is normalised. A job's metrics
can then be asked about the logarithm of the mean of probabilities, as of any other logits. Other outputs (those of a
regression) are averaged as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.exporting.trained import checkpoint_of, trained_model
from shoal.job import Batch, Job, JobError
from shoal.launch.watch import beat
from shoal.runtime.options import JobOptions
from shoal.runtime.setup import job_from

SAME = 1e-4
"""How far metrics of normalised logits may be from those of the logits themselves, relatively."""


def judge(options: JobOptions, members: Sequence[str], student: str | None) -> dict[str, Any]:
    """The validation metrics of each member, their mean, those of all together, and of the student."""
    job = job_from(options)
    if job.validation is None:
        return {}
    models = [trained_model(checkpoint_of(Path(folder)), options) for folder in members]
    found = measured_together(job, models)
    if student is not None:
        found["student"] = measured_together(job, [trained_model(checkpoint_of(Path(student)), options)])["together"]
    return found


def measured_together(job: Job, models: Sequence[nn.Module]) -> dict[str, Any]:
    """The metrics of each model, their mean, and those of the mean of their predictions."""
    data = job.validation
    if data is None:
        raise JobError(f"job {job.name!r} has no validation data; give it some: Job(..., validation=...)")
    totals: list[dict[str, list[float]]] = [{} for _ in range(len(models) + 1)]
    along: int | None = None
    with torch.no_grad(), evaluating(models):
        for start in range(0, len(data), job.global_batch):
            batch = data.batch(np.arange(start, min(start + job.global_batch, len(data))))
            outputs = [job.run_model(model, batch) for model in models]
            if not start:
                along = classes_along(job, outputs[0], batch)
            for total, output in zip(totals, [*outputs, combined(outputs, along)], strict=True):
                for name, (value, count) in job.measure(output, batch).items():
                    row = total.setdefault(name, [0.0, 0.0])
                    row[0], row[1] = row[0] + float(value), row[1] + float(count)
            beat()
    *alone, together = [job.summarise({name: (row[0], row[1]) for name, row in each.items()}) for each in totals]
    return {
        "alone": alone,
        "together": together,
        "mean_alone": {name: sum(each[name] for each in alone) / len(alone) for name in together},
        "combined": "mean of outputs" if along is None else "mean of probabilities",
    }


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """All of them in evaluation mode, then as they were."""
    before = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, before, strict=True):
            model.train(training)


def classes_along(job: Job, output: Any, batch: Batch) -> int | None:
    """The dimension along which an output has logits of classes, or None if it has none: there they may be normalised
    without changing what the job measures."""
    logits = tensor_of(output)
    if logits is None or logits.dim() < 2 or not logits.is_floating_point():
        return None
    before = job.measure(output, batch)
    for dim in (-1, 1):
        # Probabilities are no logits: normalised twice, they are others.
        there = job.measure(_with(output, logits.log_softmax(dim)), batch)
        shifted = job.measure(_with(output, logits + 1.0 + torch.zeros_like(logits)), batch)
        if _alike(before, there) and _alike(before, shifted):
            return dim
    return None


def combined(outputs: Sequence[Any], along: int | None) -> Any:
    """One output for several: the mean of probabilities as logits, or the mean of the outputs themselves."""
    tensors = [tensor_of(output) for output in outputs]
    if any(tensor is None for tensor in tensors):
        raise JobError(
            f"the outputs of members are of type {type(outputs[0]).__name__}, which has no mean: an ensemble needs a "
            "model that returns a tensor, or something with .logits"
        )
    stacked = torch.stack([tensor for tensor in tensors if tensor is not None])
    if along is None:
        return _with(outputs[0], stacked.mean(0))
    dim = along if along < 0 else along + 1
    return _with(outputs[0], stacked.log_softmax(dim).logsumexp(0) - math.log(len(outputs)))


def tensor_of(output: Any) -> torch.Tensor | None:
    """The predictions in an output: itself, or what it calls logits."""
    if isinstance(output, torch.Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return found if isinstance(found, torch.Tensor) else None


def _with(output: Any, logits: torch.Tensor) -> Any:
    if isinstance(output, torch.Tensor):
        return logits
    changed: Any = type(output)(**dict(output)) if isinstance(output, Mapping) else copy(output)
    if not isinstance(output, Mapping):
        changed.logits = logits
        return changed
    changed["logits"] = logits
    return changed


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = [(float(one[name][0]), float(other[name][0])) for name in one]
    return all(abs(a - b) <= SAME * max(1.0, abs(a)) for a, b in pairs)


class SoftTargets:
    """The loss of a student: the cross-entropy of its predictions from the mean of its teachers' probabilities, summed
    over the rows that the job's own labels count (those that are not negative)."""

    def __init__(self, job: Job, options: JobOptions, folders: Sequence[str]) -> None:
        self.job, self._options, self._folders = job, options, list(folders)
        self._teachers: list[nn.Module] = []
        self._along: int | None = None

    def __call__(self, output: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        logits = tensor_of(output)
        assert logits is not None
        device = logits.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if not self._teachers:
                self._teachers = [
                    trained_model(checkpoint_of(Path(folder)), self._options).to(device).requires_grad_(False)
                    for folder in self._folders
                ]
                said = self.job.run_model(self._teachers[0], batch)
                self._along = classes_along(self.job, said, batch)
            taught = tensor_of(combined([self.job.run_model(each, batch) for each in self._teachers], self._along))
        assert taught is not None
        if self._along is None:
            difference = (logits - taught).square()
            return difference.sum(), difference.numel()
        rows = -(taught.exp() * logits.log_softmax(self._along)).sum(self._along)
        counts = torch.ones_like(rows)
        for entry in batch.values():
            if not entry.is_floating_point() and entry.shape == rows.shape:
                counts = counts * (entry >= 0)
        return (rows * counts).sum(), counts.sum()


def student_of(job: Job, options: JobOptions, folders: Sequence[str]) -> Job:
    """The job of a network that learns from others; it is measured as the job is."""
    return replace(job, loss=SoftTargets(job, options, folders), metrics=job.measure)
