"""Regularised evolution with ageing (Real et al. 2019): of the youngest models some are drawn, the best of them has a
child that differs in a few values, and the oldest leaves the population, however good it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

MUTATIONS = 2.0
"""Values of a child that differ from its parent's, on average."""
WIDTH = 0.15
"""Standard deviation of a changed number, as a part of its range."""


class Evolution(BaseSampler):
    """Draws one child."""

    def __init__(self, *, seed: int, population: int, contestants: int | None = None) -> None:
        """`contestants`: how many are drawn, of which the best is the parent. None: half of the population."""
        self._rng = np.random.default_rng(seed)
        self._random = RandomSampler(seed=seed)
        self._population = population
        self._contestants = contestants or max(2, population // 2)
        self._parent: FrozenTrial | None = None
        self._mutated: set[str] = set()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        self._parent = None
        if len(done) < self._population:
            return
        youngest = done[-self._population :]
        drawn = self._rng.choice(len(youngest), size=min(self._contestants, len(youngest)), replace=False)
        self._parent = best_of([youngest[number] for number in sorted(drawn)], study.directions)
        names = list(self._parent.params)
        chance = min(1.0, MUTATIONS / max(1, len(names)))
        self._mutated = {name for name in names if self._rng.random() < chance}
        if not self._mutated and names:
            self._mutated = {names[self._rng.integers(len(names))]}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        parent = self._parent
        if parent is None or parent.distributions.get(param_name) != param_distribution:
            return self._random.sample_independent(study, trial, param_name, param_distribution)
        value = parent.params[param_name]
        return neighbour(self._rng, param_distribution, value) if param_name in self._mutated else value


def best_of(trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> FrozenTrial:
    """The trial that the fewest others beat: at least as good in every objective. Of equals the first."""

    def costs(trial: FrozenTrial) -> list[float]:
        pairs = zip(trial.values, directions, strict=True)
        return [-value if way == StudyDirection.MAXIMIZE else value for value, way in pairs]

    rows = [costs(each) for each in trials]

    def beaten(row: list[float]) -> int:
        return sum(1 for other in rows if other != row and all(one <= two for one, two in zip(other, row, strict=True)))

    return min(zip(rows, trials, strict=True), key=lambda pair: beaten(pair[0]))[1]


def neighbour(rng: np.random.Generator, distribution: BaseDistribution, value: Any, *, width: float = WIDTH) -> Any:
    """Another value near one: of numbers by a normal step, reflected at the ends; of choices any other."""
    if isinstance(distribution, CategoricalDistribution):
        others = [each for each in distribution.choices if each != value]
        return others[rng.integers(len(others))] if others else value
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    low, high = float(distribution.low), float(distribution.high)
    if low == high:
        return value
    at = float(value)
    if distribution.log:
        low, high, at = float(np.log(low)), float(np.log(high)), float(np.log(at))
    step = float(distribution.step) if distribution.step is not None and not distribution.log else None
    moved = at + rng.normal() * width * (high - low)
    if step is not None and abs(moved - at) < step:
        moved = at + np.copysign(step, moved - at)
    moved = low + abs(moved - low)
    moved = high - abs(high - moved)
    moved = min(max(moved, low), high)
    if step is not None:
        moved = low + step * round((moved - low) / step)
    found = float(np.exp(moved)) if distribution.log else float(moved)
    found = min(max(found, float(distribution.low)), float(distribution.high))
    return round(found) if isinstance(distribution, IntDistribution) else found
