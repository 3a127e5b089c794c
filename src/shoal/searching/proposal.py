"""One trial's values: the space is called with a trial that draws, and the model is built once, without memory, for
what it asks for while it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.job.facts import build_without_memory
from shoal.job.one_shot import MixedChoice
from shoal.job.space import MIXED, Dimension, FixedTrial, Space, Trial

if TYPE_CHECKING:
    import optuna
    from torch import nn

    from shoal.job import Job


class DrawingTrial(Trial):
    """A trial whose values Optuna draws and keeps."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def value(self, dimension: Dimension) -> Any:
        name, low, high = dimension.name, dimension.low, dimension.high
        if dimension.choices:
            return self._trial.suggest_categorical(name, dimension.choices)
        if dimension.whole:
            step = 1 if dimension.log else int(dimension.step or 1)
            return self._trial.suggest_int(name, int(low), int(high), step=step, log=dimension.log)
        return self._trial.suggest_float(name, low, high, step=dimension.step, log=dimension.log)


class MixingTrial(DrawingTrial):
    """Draws all values but those of modules, which are mixtures of all their choices."""

    def __init__(self, trial: optuna.Trial) -> None:
        super().__init__(trial)
        self.drawn: dict[str, Any] = {}
        self.mixed: list[str] = []

    def value(self, dimension: Dimension) -> Any:
        self.drawn[dimension.name] = found = super().value(dimension)
        return found

    def module(self, name: str, choices: Mapping[str, Callable[[], nn.Module]]) -> nn.Module:
        """A mixture."""
        self.mixed.append(name)
        return MixedChoice(name, choices)

    @property
    def values(self) -> dict[str, Any]:
        """The point of the network that holds all candidates."""
        return {**self.drawn, **dict.fromkeys(self.mixed, MIXED)}


class CentreTrial(Trial):
    """The middle of a space; it keeps what was asked for."""

    def __init__(self) -> None:
        self.dimensions: dict[str, Dimension] = {}

    def value(self, dimension: Dimension) -> Any:
        self.dimensions[dimension.name] = dimension
        return dimension.centre


def job_of(space: Space, trial: Trial) -> Job:
    """The job of a trial, all of whose values have been asked for."""
    job = space(trial)
    build_without_memory(job)
    return job


def centre(space: Space) -> tuple[Job, dict[str, Dimension]]:
    """A job from the middle of the space, and the dimensions that it has there."""
    trial = CentreTrial()
    return job_of(space, trial), trial.dimensions


class ChangesModel:
    """Whether another value makes a model of other parameters, which no checkpoint could be copied into."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._structural: set[str] = set()

    def __call__(self, values: Mapping[str, Any], name: str, value: Any) -> bool:
        if name not in self._structural and self._shapes(values) != self._shapes({**values, name: value}):
            self._structural.add(name)
        return name in self._structural

    def _shapes(self, values: Mapping[str, Any]) -> Any:
        try:
            job = self._space(FixedTrial(values))
            model = build_without_memory(job)
        except ValueError:
            return None  # It asks for other values than these.
        return {name: tuple(each.shape) for name, each in model.state_dict().items()}, job.name, job.global_batch
