"""Search by weight sharing: a trial first trains one network that holds all candidates (`job/one_shot.py`), keeps of
each mixture the candidate with the largest share, and then trains that model by itself, as every other trial is.

What is no module (rates, widths) is drawn: the middle of the space first, then by TPE.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from shoal.job.one_shot import proportions
from shoal.job.space import Dimension, point
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.proposal import MixingTrial, job_of
from shoal.searching.trial_run import Listener, run_to

if TYPE_CHECKING:
    from shoal.job.space import Space

FOLDER = "one-shot"
STARTS = 5
"""Trials before TPE proposes values."""


class Chosen(BaseSampler):
    """Gives modules the choices that were learned, and draws the rest."""

    def __init__(self, *, seed: int, place: int) -> None:
        self.modules: dict[str, str] = {}
        self._place = place
        self._rest = TPESampler(seed=seed, n_startup_trials=STARTS, multivariate=False, constant_liar=True)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if param_name in self.modules:
            return self.modules[param_name]
        if self._place == 0:
            return middle(param_distribution)
        return self._rest.sample_independent(study, trial, param_name, param_distribution)


def middle(distribution: BaseDistribution) -> Any:
    """The middle of a range; the first choice."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0]
    assert isinstance(distribution, (optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution))
    whole = isinstance(distribution, optuna.distributions.IntDistribution)
    found = Dimension(
        name="",
        low=distribution.low,
        high=distribution.high,
        step=None if distribution.log else distribution.step,
        log=distribution.log,
        whole=whole,
    ).centre
    return found


def learn_modules(
    space: Space, trial: optuna.Trial, options: SearchOptions, folder: Path, *, listen: Listener
) -> dict[str, dict[str, float]]:
    """Trains the network of all candidates; what share each has in its place."""
    mixing = MixingTrial(trial)
    job_of(space, mixing)
    if not mixing.mixed:
        raise CannotSearch(
            "--method darts chooses modules, and the space has none: call trial.module(name, {...}) in it, or take tpe"
        )
    run = run_to(point(options.space, mixing.values), options, folder / FOLDER, steps=options.steps, listen=listen)
    return proportions(run.model())
