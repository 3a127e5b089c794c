"""Which job, and what of it is changed: the options that training, the gate and proofs have in common.

Options are frozen, checked when they are made, and travel to ranks as JSON. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from shoal.common.suggest import did_you_mean

KINDS: dict[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number of at least 0"),
    "float": (float, "a number of at least 0"),
    "bool": (bool, "True or False"),
    "dict[str, Any]": (dict, "names with values"),
}
"""What a field of each type takes, and how a refusal calls it."""


class WrongOption(ValueError):
    """An option that does not exist, or a value that it cannot have."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A job by name or file, and what is changed of it. None leaves the job's own value."""

    job: str
    """A Python file that defines a job (`mine.py`, `mine.py:name`), or the name of a built-in one (`language:tiny`)."""
    size: str | None = None
    """Size of a built-in job."""
    steps: int | None = None
    global_batch: int | None = None
    """Samples in a step, over all ranks."""
    growth: str | None = None
    """Batches that grow, as "samples:batch, ..." (`job/large_batch.py`)."""
    scale_rule: str | None = None
    """How the learning rate grows with the batch: "linear" or "sqrt"."""
    base_batch: int | None = None
    """The batch that the learning rate was tuned for. None: the job's own."""
    warmup: int | None = None
    """Steps in which a scaled rate is reached. None: a twentieth of the run."""
    seed: int | None = None
    evaluate_every: int | None = None
    """Steps between two evaluations; 0 evaluates at the end only."""
    start_from: str | None = None
    """A file or folder of weights that the model starts with (`job/weights/`)."""
    set: dict[str, Any] | None = None
    """Other plain values of the job, or options of its optimiser: {"lr": 3e-4, "clip": 1.0}."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value: Any = getattr(self, each.name)
            kind, expected = KINDS[str(each.type).removesuffix(" | None")]
            if value is None and "None" in str(each.type):
                continue
            if kind is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, each.name, value)
            if type(value) is not kind or (kind in (int, float) and not value >= 0):
                raise WrongOption(f"{each.name}={value!r}; expected {expected}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """From names and values; those that are left out have their defaults."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                takes = ", ".join(each.name for each in fields(cls) if each.name != "job" and not each.metadata)
                raise WrongOption(f"no option {name!r}{did_you_mean(name, known)}; it takes {takes}")
        plain: dict[str, Any] = {n: str(value) if isinstance(value, Path) else value for n, value in given.items()}
        return cls(**plain)

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of the job that are changed, with their values."""
        names = ("steps", "global_batch", "scale_rule", "base_batch", "warmup", "seed", "evaluate_every")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def of_job(self) -> JobOptions:
        """The part that names the job."""
        return JobOptions(**{each.name: getattr(self, each.name) for each in fields(JobOptions)})
