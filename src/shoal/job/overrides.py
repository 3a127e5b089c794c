"""Changes of a job from outside its file: `--set lr=3e-4`, or `set={"lr": 3e-4}`.

A name is a field of the job that holds a plain value, or an option of its optimiser. Nothing is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.common.suggest import did_you_mean
from shoal.job.errors import JobError
from shoal.job.job import Job
from shoal.job.kept import layers
from shoal.job.pointwise import OptimizerFactory

FIELDS = (
    "global_batch",
    "steps",
    "evaluate_every",
    "clip",
    "seed",
    "warmup",
    "scale_rule",
    "base_batch",
    "batch_norm",
    "last_batch",
    "ema",
)
"""Fields of a Job that are plain values."""
ALIASES = {"batch": "global_batch"}


def overridden(job: Job, given: Mapping[str, Any]) -> Job:
    """The job with other values.

    Raises:
        JobError: A name is neither a field nor an option of the optimiser, or a value cannot be taken.
    """
    plain = {ALIASES.get(name, name): value for name, value in given.items()}
    fields = {name: value for name, value in plain.items() if name in FIELDS}
    others = {name: value for name, value in plain.items() if name not in fields}
    rest = {name: tuple(value) if isinstance(value, list) else value for name, value in others.items()}
    if rest:
        fields["optimizer"] = OptimizerWith(job.optimizer, rest, job.name)
    return replace(job, **fields)


@dataclass(frozen=True)
class OptimizerWith:
    """Builds an optimiser with other options. A group that has a value of its own keeps it; a rate of its own keeps its
    ratio to the optimiser's."""

    build: OptimizerFactory
    options: Mapping[str, Any]
    job: str

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        built = self.build(groups)
        parts = [each for _, each in layers(built)]
        for name, value in self.options.items():
            holding = [each for each in parts if any(name in group for group in each.param_groups)]
            if not holding:
                known = {key for each in parts for group in each.param_groups for key in group} - {"params"}
                raise JobError(
                    f"job {self.job!r}: --set {name}: neither a field of the job nor an option of "
                    f"{type(built).__name__}{did_you_mean(name, [*known, *FIELDS])}; fields: {', '.join(FIELDS)}; "
                    f"options: {', '.join(sorted(known))}"
                )
            for each in holding:
                self._change(each, name, value)
        return built

    def _change(self, optimizer: torch.optim.Optimizer, name: str, value: Any) -> None:
        default = optimizer.defaults.get(name)
        if not _like(default, value):
            wanted = f"expected a value like the optimiser's own, {default!r}"
            raise JobError(f"job {self.job!r}: --set {name}={value!r}: {wanted}")
        for group in optimizer.param_groups:
            own = group.get(name)
            if isinstance(own, torch.Tensor):
                base = float(default) if default is not None else float(own)
                group[name] = own.detach().clone().mul_(float(value) / base) if base else torch.full_like(own, value)
            elif own == default or default is None:
                group[name] = value
            elif name == "lr" and default:
                group[name] = own * (value / float(default))
        optimizer.defaults[name] = value


def _like(default: Any, value: Any) -> bool:
    """Whether a value can stand in the place of another."""
    number = (int, float)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool | None) and isinstance(value, bool | None)
    if isinstance(default, (*number, torch.Tensor)):
        return isinstance(value, number)
    if isinstance(default, (list, tuple)):
        return isinstance(value, tuple) and len(value) == len(default)
    return default is None or isinstance(value, type(default))
