"""Search spaces: a job as a function of a trial, and the names of its points.

    def space(trial):
        width = trial.suggest_int("width", 8, 64, step=8)
        rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        return Job(model=lambda: Net(width), optimizer=lambda groups: torch.optim.SGD(groups, lr=rate), ...)

`mine.py:space?lr=0.01&width=32` names one point of it, `...&layer=*` one where a module is a mixture of its choices.
It is the name of a job: every verb takes it, so what a search has found is trained, verified, planned and exported as
any other job.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from shoal.common.suggest import did_you_mean
from shoal.job.errors import JobError

if TYPE_CHECKING:
    from torch import nn

    from shoal.job.job import Job

Value = float | int | str | bool | None
MIXED = "*"
"""In the name of a point, the value of a module that is a mixture of all its choices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One thing that varies: a range of numbers, or choices."""

    name: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False
    choices: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        if self.choices:
            strange = next((each for each in self.choices if not isinstance(each, (float, int, str, type(None)))), None)
            if strange is not None:
                raise JobError(
                    f"choice {strange!r} of {self.name!r} is a {type(strange).__name__}; choices are kept as text: "
                    "give names or numbers, and look the objects up by them"
                )
        elif not self.low <= self.high or (self.log and self.low <= 0) or not math.isfinite(self.high - self.low):
            least = "above 0" if self.log else "finite"
            raise JobError(f"{self.name!r} lies between {self.low} and {self.high}: expected low <= high, both {least}")

    def contains(self, value: Any) -> bool:
        """Whether it is a value of this dimension."""
        if self.choices:
            return any(value == each and type(value) is type(each) for each in self.choices)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return False
        if self.step is not None:
            steps = (value - self.low) / self.step
            return abs(steps - round(steps)) < 1e-8
        return not self.whole or float(value).is_integer()

    @property
    def centre(self) -> Value:
        """The middle of the range; the first choice."""
        if self.choices:
            return self.choices[0]
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        if self.step is not None:
            middle = self.low + self.step * round((middle - self.low) / self.step)
        return int(middle) if self.whole else middle

    def words(self) -> str:
        """For messages: what it takes."""
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        return f"{'a whole number' if self.whole else 'a number'} from {self.low:g} to {self.high:g}" + (
            f" in steps of {self.step:g}" if self.step is not None else ""
        )


class Trial(ABC):
    """What a space is a function of. Its methods are called as those of Optuna's trials."""

    @abstractmethod
    def value(self, dimension: Dimension) -> Any:
        """The trial's value in a dimension."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number between two others, `log`: evenly in its logarithm."""
        return float(self.value(Dimension(name=name, low=float(low), high=float(high), step=step, log=log)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number between two others, which are included."""
        each = None if log else step
        return int(self.value(Dimension(name=name, low=low, high=high, step=each, log=log, whole=True)))

    def suggest_categorical(self, name: str, choices: Sequence[Value]) -> Any:
        """One of several texts or numbers."""
        return self.value(Dimension(name=name, choices=tuple(choices)))

    def module(self, name: str, choices: Mapping[str, Callable[[], nn.Module]]) -> nn.Module:
        """One of several modules, each built by a function. To a search by weight sharing it is a mixture of them all:
        they take and return tensors of the same shapes."""
        return choices[self.suggest_categorical(name, tuple(choices))]()


class FixedTrial(Trial):
    """A trial whose values are known: one point of a space."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values, self.asked = dict(values), list[str]()

    def value(self, dimension: Dimension) -> Any:
        self.asked.append(dimension.name)
        if dimension.name not in self.values:
            raise JobError(
                f"the point of the space has no {dimension.name}; add {dimension.name}=..., {dimension.words()}, to "
                f"{', '.join(self.values) or 'the empty point'}"
            )
        found = self.values[dimension.name]
        if not dimension.contains(found):
            raise JobError(f"{dimension.name}={found!r} is not in the space, which takes {dimension.words()}")
        return found

    def module(self, name: str, choices: Mapping[str, Callable[[], nn.Module]]) -> nn.Module:
        """The chosen module, or the mixture of all."""
        if self.values.get(name) != MIXED or MIXED in choices:
            return super().module(name, choices)
        from shoal.job.one_shot import MixedChoice

        self.asked.append(name)
        return MixedChoice(name, choices)


Space = Callable[[Trial], "Job"]


def point(space: str, values: Mapping[str, Value]) -> str:
    """The name of the job at a point of a space."""
    return f"{space}?{urlencode({name: _text(value) for name, value in values.items()}, quote_via=quote, safe='')}"


def _text(value: Value) -> str:
    """Numbers, true, false and null as JSON; a text as it is, or as JSON where it reads as something else."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)


def split_point(name: str) -> tuple[str, dict[str, Value]]:
    """(the space, the values) of a point's name."""
    space, _, rest = name.partition("?")
    values: dict[str, Value] = {}
    for key, text in parse_qsl(rest, keep_blank_values=True):
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return space, values


def is_point(name: str) -> bool:
    """Whether a name is that of a point of a space."""
    return "?" in name


def job_at(name: str, *, size: str | None = None) -> Job:
    """The job at a point that a name gives."""
    from shoal.job.facts import build_without_memory

    space, values = split_point(name)
    trial = FixedTrial(values)
    job = load_space(space, size=size)(trial)
    if MIXED in values.values():
        from shoal.job.one_shot import one_shot

        job = one_shot(job)
    if set(values) - set(trial.asked):
        build_without_memory(job)  # What a model asks for while it is built.
    for each in values:
        if each not in trial.asked:
            raise JobError(
                f"{name}: the space {space} has no {each!r}{did_you_mean(each, trial.asked)}; it has "
                f"{', '.join(dict.fromkeys(trial.asked)) or 'nothing that varies'}"
            )
    return job


def load_space(name: str, *, size: str | None = None) -> Space:
    """The space that a text names: `mine.py` (its function `space`), `mine.py:name`, `language`, `image:tiny`."""
    from shoal.job import names
    from shoal.job.load import load_attribute

    if not names.is_file(name):
        chosen = names.parse_name(name, size=size)
        if chosen.task == "language":
            from shoal.job.tasks.language_space import language_space

            return language_space(chosen.size)
        from shoal.job.tasks.image_space import image_space

        return image_space(chosen.size)
    path, wanted = names.split_file(name)
    function, guarded = load_attribute(path, wanted or "space", write="def {wanted}(trial) -> Job")
    if not callable(function):
        raise JobError(
            f"{wanted or 'space'!r} in {path} is a {type(function).__name__}, but must be a function of a trial that "
            "returns a Job"
        )

    def space(trial: Trial) -> Job:
        from shoal.job.job import Job

        found = guarded(f"calling {wanted or 'space'}(trial)", lambda: function(trial))
        if not isinstance(found, Job):
            raise JobError(f"{wanted or 'space'} in {path} returned a {type(found).__name__}, but must return a Job")
        return found

    return space
