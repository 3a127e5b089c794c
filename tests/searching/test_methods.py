"""Samplers and the study, without training: draws that depend on a trial's place alone, evolution, populations."""

from __future__ import annotations

import sys

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from shoal.searching.evolution import Evolution, best_of, neighbour
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.population import COPIED, PARENT
from shoal.searching.results import importances, results
from shoal.searching.sampling import pruner_of, rungs, sampler_of
from shoal.searching.study import local_storage, me, open_study, queue_again, release, slot, standing

NAMES = "abcdef"


def options_of(method: str, *, seed: int = 0, trials: int = 30, **more) -> SearchOptions:
    return SearchOptions(space="none", method=method, trials=trials, seed=seed, steps=27, **more)


def hills(trial) -> float:
    """Six numbers of which each should be near 0.3, and a choice."""
    found = sum((trial.suggest_float(name, 0.0, 1.0) - 0.3) ** 2 for name in NAMES)
    return found + (0.0 if trial.suggest_categorical("kind", ("bad", "worse", "good")) == "good" else 0.3)


def study_of(options: SearchOptions) -> optuna.Study:
    study = optuna.create_study(direction="minimize")
    study.sampler = sampler_of(options, worker="w")
    return study


def searched(options: SearchOptions, count: int) -> optuna.Study:
    study = study_of(options)
    for _ in range(count):
        trial = study.ask()
        study.tell(trial, hills(trial))
    return study


@pytest.mark.parametrize("method", ["tpe", "evolution"])
def test_methods_beat_random_on_a_function(method):
    better = [
        searched(options_of(method, seed=seed, trials=60), 60).best_value
        < searched(options_of("random", seed=seed, trials=60), 60).best_value
        for seed in range(5)
    ]
    assert sum(better) >= 4


@pytest.mark.parametrize("method", ["random", "tpe", "evolution"])
def test_a_lost_trial_changes_no_draw(method):
    options = options_of(method)
    undisturbed = [each.params for each in searched(options, 14).trials]
    study, done = study_of(options), 0
    while done < 14:
        trial = study.ask()
        if trial.number in (2, 9):  # Lost before its values were drawn, and after.
            if trial.number == 9:
                hills(trial)
            study.tell(trial, state=TrialState.FAIL)
            queue_again(study, study.trials[trial.number])
            continue
        study.tell(trial, hills(trial))
        done += 1
    assert len(study.trials) == 16
    assert [each.params for each in standing(study.trials)] == undisturbed
    assert [slot(study.trials, each) for each in standing(study.trials)] == list(range(14))


def test_evolution_draws_from_the_young_and_mutates_little():
    sampler = Evolution(seed=1, population=5)
    study = optuna.create_study(direction="minimize")
    for number in range(20):
        study.sampler = Evolution(seed=number, population=5)
        trial = study.ask()
        value = hills(trial)
        study.tell(trial, -10.0 if number == 0 else value)  # The first is best of all, and soon too old.
    oldest = study.trials[0].params
    changed = []
    for seed in range(40):
        study.sampler = sampler = Evolution(seed=seed, population=5)
        trial = study.ask()
        hills(trial)
        assert sampler._parent is not None
        assert sampler._parent.number >= study.trials[-1].number - 40 - 5
        assert sampler._parent.params != oldest
        changed.append(sum(trial.params[name] != sampler._parent.params[name] for name in trial.params))
        study.tell(trial, state=TrialState.FAIL)
    assert min(changed) >= 1
    assert 1 < np.mean(changed) < 3.5


@pytest.mark.parametrize(
    "distribution",
    [
        FloatDistribution(0.0, 1.0),
        FloatDistribution(1e-6, 1e-1, log=True),
        IntDistribution(4, 16, step=4),
        IntDistribution(1, 1000, log=True),
        FloatDistribution(0.0, 1.0, step=0.25),
        CategoricalDistribution(("a", "b")),
        FloatDistribution(2.0, 2.0),
    ],
)
def test_neighbours_stay_inside(distribution):
    rng = np.random.default_rng(0)
    value = distribution.to_external_repr(distribution.to_internal_repr(getattr(distribution, "low", "a")))
    seen = set()
    for _ in range(200):
        value = neighbour(rng, distribution, value, width=0.5)
        assert distribution._contains(distribution.to_internal_repr(value))
        seen.add(value)
    assert len(seen) > 1 or distribution.single()


def test_the_best_of_several_objectives_is_one_that_few_beat():
    study = optuna.create_study(directions=["maximize", "minimize"])
    for quality, seconds in ((0.5, 1.0), (0.9, 1.0), (0.8, 2.0)):
        study.tell(study.ask(), [quality, seconds])
    assert best_of(study.trials, study.directions).number == 1


def test_a_population_copies_the_best_and_perturbs():
    options = options_of("pbt", trials=8, rounds=3)
    study = optuna.create_study(direction="minimize")
    study.sampler = sampler_of(options, worker="w", structural=lambda values, name, value: name == "a")
    for _ in range(options.wanted):
        trial = study.ask()
        study.tell(trial, hills(trial))
    first, second = study.trials[:8], study.trials[8:16]
    order = sorted(range(8), key=lambda number: first[number].value)
    for member, trial in enumerate(second):
        parent = study.trials[trial.user_attrs[PARENT]]
        if member in order[-2:]:
            assert trial.user_attrs[COPIED]
            assert parent.number in order[:2]
            assert trial.params["a"] == parent.params["a"]  # It would change the model.
            assert trial.params != parent.params
        else:
            assert parent.number == member
            assert trial.params == parent.params


def test_halving_ends_bad_trials_at_its_rungs():
    options = options_of("halving", trials=9)
    assert rungs(options) == [1, 3, 9, 27]
    study = optuna.create_study(direction="minimize")
    study.sampler, study.pruner = sampler_of(options, worker="w"), pruner_of(options)
    reached = []
    for number in range(9):
        trial = study.ask()
        for step in rungs(options):
            trial.report(float(number), step)  # Each is worse than all before.
            if step < 27 and trial.should_prune():
                break
        reached.append(step)
    assert reached[0] == 27
    assert reached[-1] == 1


def test_a_study_is_kept_and_refuses_another_search(tmp_path):
    url, options = local_storage(tmp_path), options_of("random", trials=3)
    used: list[str] = []
    watching = [True]
    sys.addaudithook(lambda event, args: used.append(event) if watching and event == "pickle.find_class" else None)
    study = open_study(url, "s", options)
    study.sampler = sampler_of(options, worker=me("1"))
    for _ in range(5):
        trial = study.ask()
        study.tell(trial, hills(trial))
    lost = study.ask()
    hills(lost)
    assert release(study, lambda each: True) == 1
    again = open_study(url, "s", options)
    found = results(again, options)
    watching.clear()
    assert used == []  # Nothing was unpickled.
    assert [row["state"] for row in found["trials"]] == ["finished"] * 5 + ["queued"]
    assert found["trials"][-1]["params"] == lost.params
    assert sum(importances(again).values()) == pytest.approx(1.0)
    assert open_study(url, "s", options_of("random", trials=9)).user_attrs["options"]["trials"] == 9
    with pytest.raises(CannotSearch, match="has method 'random'"):
        open_study(url, "s", options_of("tpe", trials=3))
