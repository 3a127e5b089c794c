"""How the values of a trial are drawn: a sampler for each trial, seeded by the search's seed and the trial's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from shoal.searching.evolution import Evolution
from shoal.searching.options import SearchOptions
from shoal.searching.population import Population
from shoal.searching.shared_weights import Chosen
from shoal.searching.study import WORKER, slot

FACTOR = 3
"""Of successive halving: one trial in so many goes on at each rung."""
RUNGS = 3
"""Below the last."""


class PlacedSampler(BaseSampler):
    """Has another sampler draw each trial, made anew with a seed of its own. No state outlives a trial, so it does not
    matter which process drew those before."""

    def __init__(self, make: Callable[[int, int], BaseSampler], *, seed: int, worker: str) -> None:
        """`make` is given a seed and the trial's place."""
        self._make, self._seed, self._worker = make, seed, worker
        self._inner: BaseSampler | None = None

    @property
    def inner(self) -> BaseSampler:
        """The one that draws the trial at hand."""
        assert self._inner is not None, "no trial has begun"
        return self._inner

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        study._storage.set_trial_user_attr(trial._trial_id, WORKER, self._worker)
        place = slot(study.get_trials(deepcopy=False), trial)
        seed = int(np.random.SeedSequence([self._seed, place]).generate_state(1)[0])
        self._inner = self._make(seed, place)
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self.inner.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        if self._inner is not None:
            self._inner.after_trial(study, trial, state, values)


def sampler_of(options: SearchOptions, *, worker: str, structural: Callable[..., Any] | None = None) -> PlacedSampler:
    """The sampler of a method. `structural`: for PBT, whether a value changes the model's parameters."""

    def make(seed: int, place: int) -> BaseSampler:
        if options.method == "tpe":
            start = max(5, min(10, options.trials // 4))
            return TPESampler(seed=seed, n_startup_trials=start, multivariate=True, group=False, constant_liar=True)
        if options.method == "evolution":
            return Evolution(seed=seed, population=options.parents)
        if options.method == "pbt":
            return Population(seed=seed, place=place, members=options.trials, structural=structural)
        if options.method == "darts":
            return Chosen(seed=seed, place=place)
        return RandomSampler(seed=seed)

    return PlacedSampler(make, seed=options.seed, worker=worker)


def first_rung(steps: int) -> int:
    """Steps after which successive halving first compares trials."""
    return max(1, steps // FACTOR**RUNGS)


def rungs(options: SearchOptions) -> list[int]:
    """Steps at which a trial is evaluated; the last is its end."""
    if options.method != "halving":
        return [options.steps]
    first = first_rung(options.steps)
    found = [first * FACTOR**number for number in range(RUNGS + 1)]
    return [*(each for each in found if each < options.steps), options.steps]


def pruner_of(options: SearchOptions) -> BasePruner:
    """What ends trials early."""
    if options.method != "halving":
        return NopPruner()
    return SuccessiveHalvingPruner(min_resource=first_rung(options.steps), reduction_factor=FACTOR)
