"""What a search found, as plain values: its trials, the best, the Pareto front, which dimensions mattered."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from shoal.job.space import point
from shoal.searching.options import SearchOptions
from shoal.searching.population import COPIED, PARENT
from shoal.searching.study import REJECTED, origin, slot, standing

if TYPE_CHECKING:
    from optuna.study import Study

STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "ended early",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "queued",
}
FEWEST = 4
"""Finished trials before importances are computed."""


def results(study: Study, options: SearchOptions, *, complete: bool = True) -> dict[str, Any]:
    """All that the table, the page and `--json` show; while trials run, without what takes long."""
    trials = study.get_trials(deepcopy=False)
    counted = standing(trials)
    rows = [_row(trials, each, options) for each in counted]
    known = {row["number"]: row for row in rows}
    best, rejected = best_trial(study), sum(REJECTED in each.user_attrs for each in trials)
    return {
        "options": options.to_json(),
        "trials": rows,
        "best": None if best is None else known[best.number],
        "front": [known[each.number] for each in front(study)] if options.cluster else [],
        "importances": importances(study) if complete else {},
        "rejected": rejected,
        "lost": sum(len(each.system_attrs.get("retry_history", ())) for each in counted),
    }


def _row(trials: Sequence[FrozenTrial], trial: FrozenTrial, options: SearchOptions) -> dict[str, Any]:
    attrs, place = trial.user_attrs, slot(trials, trial)
    row = {
        "number": trial.number,
        "trial": place,
        "state": STATES[trial.state],
        "params": dict(trial.params),
        "value": trial.values[0] if trial.values else None,
        "reason": attrs.get("reason"),
        "job": attrs.get("job"),
        "step_s": attrs.get("step_s"),
        "memory_bytes": attrs.get("memory_bytes"),
        "seconds": attrs.get("seconds"),
        "predicted": attrs.get("predicted"),
        "shares": attrs.get("shares"),
        "folder": f"trials/{origin(trial):04d}",
        "reported": {str(step): value for step, value in trial.intermediate_values.items()},
        "started": None if trial.datetime_start is None else trial.datetime_start.isoformat(),
        "ended": None if trial.datetime_complete is None else trial.datetime_complete.isoformat(),
    }
    if options.method == "pbt":
        row["round"], row["member"] = divmod(place, options.trials)
        row["parent"], row["copied"] = attrs.get(PARENT), bool(attrs.get(COPIED))
    return row


def best_trial(study: Study) -> FrozenTrial | None:
    """The finished trial of the best quality; of equals the first."""
    done = [each for each in study.get_trials(deepcopy=False) if each.state == TrialState.COMPLETE]
    sign = -1.0 if study.directions[0] == StudyDirection.MAXIMIZE else 1.0
    return min(done, key=lambda each: (sign * each.values[0], each.number), default=None)


def front(study: Study) -> list[FrozenTrial]:
    """The finished trials that no other is as good as in all objectives, the fastest first."""
    return sorted(study.best_trials, key=lambda each: (each.values[1], each.number))


def importances(study: Study) -> dict[str, float]:
    """The part that each dimension has in what the best trials have in common (PED-ANOVA); of dimensions that all
    finished trials have. Empty where there are too few."""
    done = [each for each in study.get_trials(deepcopy=False) if each.state == TrialState.COMPLETE]
    common = set.intersection(*(set(each.params) for each in done)) if done else set()
    varied = sorted(name for name in common if len({each.params[name] for each in done}) > 1)
    if len(done) < FEWEST or not varied:
        return {}
    sign = -1.0 if study.directions[0] == StudyDirection.MAXIMIZE else 1.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # It says that low values of a target are good ones, as they are here.
            found = get_param_importances(
                study,
                evaluator=PedAnovaImportanceEvaluator(),
                params=varied,
                target=lambda trial: sign * trial.values[0],
            )
    except (ValueError, RuntimeError, optuna.exceptions.OptunaError):
        return {}
    total = sum(found.values())
    return {name: value / total for name, value in found.items()} if total > 0 else {}


def lineage(study: Study, best: FrozenTrial, options: SearchOptions) -> list[tuple[int, str]]:
    """(to which step, as which point) the winner is trained: of PBT the values change from round to round. Its file is
    that of the options: a database that others write to must not say what is loaded."""
    if options.method != "pbt":
        return [(options.steps, point(options.space, best.params))]
    trials = study.get_trials(deepcopy=False)
    found: list[tuple[int, str]] = []
    trial: FrozenTrial | None = best
    while trial is not None:
        number = slot(trials, trial) // options.trials + 1
        found.insert(0, (options.steps * number // options.rounds, point(options.space, trial.params)))
        parent = trial.user_attrs.get(PARENT)
        trial = None if parent is None else trials[parent]
    return found
