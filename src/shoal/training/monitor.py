"""The validation value that early stopping and the best checkpoints look at.

Every rank has the same values and decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.job import Job
from shoal.job.errors import did_you_mean
from shoal.runtime.options import WrongOption
from shoal.training.options import TrainOptions


class Monitor:
    """What was best so far, and for how many evaluations nothing was better."""

    def __init__(self, options: TrainOptions, job: Job, saved: Mapping[str, Any] | None = None) -> None:
        self.patience, self.keep_best, self.least = options.patience, options.keep_best, options.min_delta
        target, self.given = job.target, options.monitor
        self.metric = options.monitor or (target.metric if target is not None else "loss")
        better = options.better
        if better is None and target is not None and target.metric == self.metric:
            better = target.better
        if better is None and self.metric == "loss":
            better = "lower"
        self.better = better
        saved = saved or {}
        self.best: list[tuple[float, int]] = [(float(value), int(step)) for value, step in saved.get("best", ())]
        """(value, step) of the best evaluations, the best first."""
        self.record: float | None = saved.get("record")
        self.waited: int = int(saved.get("waited", 0))

    @property
    def active(self) -> bool:
        return self.patience is not None or self.keep_best > 0

    def require_sense(self, job: Job, evaluate_every: int, values: Sequence[str] | None = None) -> None:
        """Refuses options that could never act; `values` are the names of the validation values, if they are known."""
        if not self.active:
            if self.given is not None:
                raise WrongOption(f"--monitor {self.given}: nothing looks at it; give --patience or --keep-best too")
            return
        option = "--patience" if self.patience is not None else "--keep-best"
        if job.validation is None:
            raise WrongOption(f"{option}: job {job.name!r} has no validation data; give it some: Job(validation=...)")
        if not evaluate_every and self.patience is not None:
            raise WrongOption(f"{option}: the job evaluates at its end only; say when: --evaluate-every 100")
        if self.better is None:
            raise WrongOption(f"--monitor {self.metric}: is higher or lower better? Add --better higher (or lower)")
        if values is not None:
            self._require_measured(values)

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Takes in an evaluation; whether it is among the best, so that a checkpoint is kept."""
        if not self.active:
            return False
        self._require_measured(metrics)
        value = float(metrics[self.metric])
        if self._improves(value, self.record, self.least):
            self.record, self.waited = value, 0
        else:
            self.waited += 1
        if not self.keep_best or math.isnan(value):
            return False
        sign = -1 if self.better == "higher" else 1
        self.best = sorted([*self.best, (value, step)], key=lambda row: (sign * row[0], row[1]))[: self.keep_best]
        return (value, step) in self.best

    def _require_measured(self, values: Iterable[str]) -> None:
        if self.metric not in values:
            known = list(values)
            suggestion = did_you_mean(self.metric, known)
            raise WrongOption(f"--monitor {self.metric}: the validation values are {', '.join(known)}.{suggestion}")

    def _improves(self, value: float, record: float | None, least: float) -> bool:
        if math.isnan(value):
            return False
        if record is None:
            return True
        return value > record + least if self.better == "higher" else value < record - least

    @property
    def exhausted(self) -> str | None:
        """Why training should stop; None if it should not."""
        if self.patience is None or self.waited < max(1, self.patience):
            return None
        times = "evaluation" if self.waited == 1 else f"{self.waited} evaluations"
        return f"{self.metric} has not improved on {self.record:.6g} in the last {times}"

    @property
    def protected(self) -> frozenset[int]:
        """Steps whose checkpoints are kept."""
        return frozenset(step for _, step in self.best)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint's progress."""
        return {"best": [list(row) for row in self.best], "record": self.record, "waited": self.waited}


def is_monitored(saved: Any) -> bool:
    """Whether this is what `Monitor.to_json` gives, or nothing."""
    if not isinstance(saved, dict):
        return False
    number = (int, float)
    best, record, waited = saved.get("best", []), saved.get("record"), saved.get("waited", 0)
    pairs = isinstance(best, list) and all(
        isinstance(row, list) and len(row) == 2 and type(row[0]) in number and type(row[1]) is int for row in best
    )
    return pairs and type(waited) is int and (record is None or type(record) in number)
