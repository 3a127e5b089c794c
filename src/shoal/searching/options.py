"""What is searched, and how: written into the search's folder, and given to every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

METHODS = ("random", "tpe", "halving", "evolution", "pbt", "darts")
SEVERAL_OBJECTIVES = ("random", "tpe", "evolution")
"""Methods that can weigh quality against predicted time and memory."""


class CannotSearch(ValueError):
    """What was asked for cannot be searched as it stands."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """One search."""

    space: str
    """A Python file with a function `space(trial)` that returns a Job, or `language`, `image`, with a size."""
    method: str = "tpe"
    trials: int = 20
    strategy: str = "serial"
    """How every trial is trained."""
    metric: str = "loss"
    better: str = "lower"
    seed: int = 0
    """Of the search, and of the training of every trial."""
    steps: int = 0
    """Of a full trial."""
    population: int = 0
    """Evolution: models that may have children. 0: a quarter of the trials."""
    rounds: int = 4
    """PBT: parts of a trial, between which members copy and perturb."""
    cluster: str | None = None
    """Where predicted time and memory are further objectives."""
    memory_limit: float | None = None
    """Bytes a device that every proposed model must be predicted to fit."""
    keep_checkpoints: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        return cls(**given)

    @property
    def wanted(self) -> int:
        """Entries of the study: a trial each, or each part of one."""
        return self.trials * self.rounds if self.method == "pbt" else self.trials

    @property
    def parents(self) -> int:
        """Models of evolution that may have children."""
        return self.population or max(3, self.trials // 4)

    def differences(self, other: SearchOptions) -> list[str]:
        """The options by which two searches differ; more trials are the same search, but of a population."""
        same = other if self.method == "pbt" else replace(other, trials=self.trials)
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(same, each.name)]
