"""Population-based training (Jaderberg et al. 2017): members train in rounds. Between two rounds a member of the worst
quarter copies the checkpoint and the values of one of the best (exploit), and perturbs the values (explore).

An entry of the study is one member in one round. Its place decides which: all of a round come before the next, and a
round begins when the one before is complete, so what is drawn does not depend on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from shoal.searching.evolution import neighbour
from shoal.searching.study import FINISHED, slot, standing

QUARTER = 4
RESAMPLED = 0.2
"""Chance of a perturbed number to be drawn anew from its range."""
SWITCHED = 0.2
"""Chance of a choice to change."""
WIDTH = 0.1
PARENT, COPIED = "parent", "copied"

Structural = Callable[[dict[str, Any], str, Any], bool]
"""(values, name, another value of it) -> whether that makes a model of other parameters."""


class Population(BaseSampler):
    """Draws the values of one member for one round."""

    def __init__(self, *, seed: int, place: int, members: int, structural: Structural | None) -> None:
        self._rng = np.random.default_rng(seed)
        self._random = RandomSampler(seed=seed)
        self._round, self._member = divmod(place, members)
        self._members, self._structural = members, structural
        self._values: dict[str, Any] = {}

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._values = {}
        if self._round == 0:
            return
        before = self._previous(study.get_trials(deepcopy=False))
        mine, way = before[self._member], study.directions[0]
        order = sorted(range(self._members), key=lambda member: cost(before[member], way))
        few = max(1, self._members // QUARTER)
        bad = self._member in order[-few:] or cost(mine, way) == float("inf")
        parent, copied = mine, False
        if bad and self._members > 1:
            parent, copied = before[order[self._rng.integers(few)]], True
        study._storage.set_trial_user_attr(trial._trial_id, PARENT, parent.number)
        study._storage.set_trial_user_attr(trial._trial_id, COPIED, copied)
        self._values = self._explored(parent) if copied else dict(parent.params)

    def _previous(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """The members in the round before, in order."""
        first = (self._round - 1) * self._members
        found = {slot(trials, each): each for each in standing(trials)}
        return [found[first + member] for member in range(self._members)]

    def _explored(self, parent: FrozenTrial) -> dict[str, Any]:
        found = dict(parent.params)
        for name, distribution in parent.distributions.items():
            choice = isinstance(distribution, CategoricalDistribution)
            if choice and self._rng.random() >= SWITCHED:
                continue
            anew = not choice and self._rng.random() < RESAMPLED
            value = neighbour(self._rng, distribution, found[name], width=1.0 if anew else WIDTH)
            if value != found[name] and self._structural is not None and not self._structural(found, name, value):
                found[name] = value
        return found

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if param_name in self._values:
            return self._values[param_name]
        return self._random.sample_independent(study, trial, param_name, param_distribution)


def cost(trial: FrozenTrial, direction: StudyDirection) -> float:
    """The lower the better; of a trial without a value, infinite."""
    if trial.state != TrialState.COMPLETE or trial.value is None:
        return float("inf")
    return -trial.value if direction == StudyDirection.MAXIMIZE else trial.value


def may_ask(trials: Sequence[FrozenTrial], members: int) -> bool:
    """Whether the round before the next entry's is complete, or a lost entry waits. `trials`: those that stand."""
    if any(each.state == TrialState.WAITING for each in trials):
        return True
    first = len(trials) // members * members
    return all(each.state in FINISHED for each in trials[:first])
