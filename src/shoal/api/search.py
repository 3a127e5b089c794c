"""`shoal.search`: architectures and hyper-parameters, trials in parallel."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords, strategy_of
from shoal.common.log import log_message
from shoal.common.printed import PrintedTable
from shoal.common.suggest import did_you_mean
from shoal.searching.options import METHODS, SEVERAL_OBJECTIVES, CannotSearch, SearchOptions
from shoal.strategy import Strategy, Term

if TYPE_CHECKING:
    from shoal.job import Job
    from shoal.training.record.run import Run

__all__ = ["CannotSearch", "Search", "search"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Search(PrintedTable):
    """What a search found."""

    folder: Path
    results: dict[str, Any]
    """All that the page shows, as plain values."""

    @property
    def trials(self) -> list[dict[str, Any]]:
        """One row for each trial, in order."""
        found: list[dict[str, Any]] = self.results["trials"]
        return found

    @property
    def best(self) -> dict[str, Any]:
        """The row of the best trial; its `job` names the job of these values."""
        found: dict[str, Any] = self.results["best"]
        return found

    @property
    def front(self) -> list[dict[str, Any]]:
        """The trials that no other beats in quality, predicted step time and predicted memory together."""
        found: list[dict[str, Any]] = self.results["front"]
        return found

    @property
    def winner(self) -> Run | None:
        """The run of the best, retrained; `winner.model()` is its model."""
        if "winner" not in self.results:
            return None
        from shoal.training.record.run import read_run

        return read_run(Path(self.results["winner"]["folder"]))

    @property
    def page(self) -> Path:
        """The HTML page: history, importances, the front, every trial."""
        from shoal.searching.report import FILE

        return self.folder / FILE

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return {"folder": str(self.folder), **self.results}

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = sorted(self.trials, key=_rank(self.results["options"]["better"]))
        several = bool(self.results["options"]["cluster"])
        head = ["trial", "state", self.results["options"]["metric"], *(["step", "memory"] if several else []), "values"]
        return f"{len(rows)} trials in {self.folder}", head, [_cells(row, several=several) for row in rows]


def _rank(better: str) -> Callable[[dict[str, Any]], tuple[bool, float]]:
    sign = -1.0 if better == "higher" else 1.0
    return lambda row: (row["value"] is None, sign * (row["value"] or 0.0))


def _cells(row: dict[str, Any], *, several: bool) -> list[str]:
    costs = []
    if several:
        known = row["predicted"]
        costs = (
            ["-", "-"]
            if known is None
            else [f"{1000 * known['step_s']:.3g} ms", f"{known['memory_bytes'] / 1e6:.3g} MB"]
        )
    number = str(row["trial"]) if "member" not in row else f"{row['member']}, round {row['round'] + 1}"
    value = "-" if row["value"] is None else f"{row['value']:.4g}"
    return [number, row["state"], value, *costs, words(row["params"])]


def words(params: dict[str, Any]) -> str:
    """Values in a few words."""
    return "  ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in params.items()
    )


@checked_keywords
def search(
    space: str | Path | Callable[..., Job],
    *,
    method: str = "tpe",
    trials: int = 20,
    devices: int | None = None,
    strategy: str | Strategy | Term | None = None,
    metric: str | None = None,
    better: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    population: int | None = None,
    rounds: int = 4,
    cluster: str | None = None,
    memory_limit: str | float | None = None,
    folder: str | Path | None = None,
    storage: str | None = None,
    study: str | None = None,
    retrain: bool = True,
    keep_checkpoints: bool = False,
    progress: Callable[[dict[str, Any]], None] = log_message,
) -> Search:
    """Searches a space of jobs for the best architecture or hyper-parameters, trials in parallel.

    Args:
        space: A Python file with a function `space(trial)` that returns a Job (`"mine.py"`, `"mine.py:name"`), such a
            function of a file, or a built-in space: `"language"`, `"image"`, with a size (`"image:small"`).
        method: `random`, `tpe`, `halving` (successive halving, asynchronous), `evolution` (regularised, with ageing),
            `pbt` (population-based training) or `darts` (one network that holds all candidates of `trial.module`).
        trials: How many jobs are trained; of `pbt` the members of the population.
        devices: Of this machine, for all trials together. None: its cores.
        strategy: How each trial is trained. None: by a prediction, few wide trials or many narrow ones.
        metric: The validation value to compare. None: that of the job's target, or the loss.
        better: `"lower"` or `"higher"`. None: as the target says; lower for the loss.
        seed: Of the search, and of the training of every trial.
        steps: Steps of a full trial. None: the job's.
        population: Of `evolution`: the youngest models, of which one has the next child. None: a quarter of the trials.
        rounds: Of `pbt`: parts of a trial, between which bad members copy good ones.
        cluster: Where the model is meant to run: a preset such as `"dgx-a100"`, a TOML file, or `"this"` machine.
            Predicted step time and memory of a device under the strategy become further objectives.
        memory_limit: Memory of a device that every model must be predicted to fit, `"8 GB"` or bytes; others are not
            trained. None: what the cluster's device has.
        folder: Where the study and all runs go; one that holds the same search is resumed. None: a new one in `runs`.
        storage: A database that several machines share, as a URL of SQLAlchemy. None: a file in the folder.
        study: The search's name in the database. None: the folder's.
        retrain: Whether the best is trained again and kept, in `winner`.
        keep_checkpoints: Whether those of all trials are kept.
        progress: Is given messages about the trials. The `shoal` logger by default.

    Returns:
        The trials, the best, and its model.

    Example:
        found = shoal.search("image", method="evolution", trials=30, devices=2)
        model = found.winner.model()
    """
    _require_installed()
    from shoal.searching.run import run_search, stored

    where = Path(folder) if folder is not None else Path("runs") / f"search-{time.strftime('%Y-%m-%d-%H%M%S')}"
    _require(method, trials, devices, rounds, better)
    limit = _bytes_of(memory_limit)
    _require_objectives(method, cluster, limit)
    before = stored(where)
    if before is not None and strategy is None:
        strategy = before.strategy
    name = _name_of(space)
    job, dimensions = _middle(name)
    if not dimensions:
        raise CannotSearch(f"nothing varies in the space {name}: call trial.suggest_float, suggest_int, ... in it")
    metric, better = _objective(job, metric, better)
    count, at_once = devices or len(os.sched_getaffinity(0)), trials
    if strategy is None:
        from shoal.searching.width import divide

        division = divide(job, devices=count, trials=at_once)
        strategy, workers = division.strategy, division.workers
        progress({"event": "note", "text": division.why})
    else:
        strategy = strategy_of(strategy)
        if strategy.world > count:
            raise CannotSearch(f"--strategy {strategy} needs {strategy.world} devices, and --devices gives {count}")
        workers = min(count // strategy.world, at_once)
    if method == "darts" and any(level.zero == 3 for level in strategy_of(strategy).dp_levels):
        raise CannotSearch(
            f"--strategy {strategy}: --method darts computes with every parameter twice in a step, and zero=3 gives "
            "parameters back after their block; use zero=2"
        )
    if cluster is not None:
        from shoal.searching.predicted import place_of

        place = place_of(cluster, strategy_of(strategy))
        limit = place.device_bytes if limit is None else limit
        size = f"{limit / 1e9:.4g} GB" if limit >= 1e9 else f"{limit / 1e6:.4g} MB"
        progress(
            {
                "event": "note",
                "text": f"step time and memory are predicted for {place.words}; every model "
                f"must fit {size} of a device",
            }
        )
    options = SearchOptions(
        space=name,
        method=method,
        trials=trials,
        strategy=str(strategy),
        metric=metric,
        better=better,
        seed=seed,
        steps=steps or job.steps,
        population=population or 0,
        rounds=rounds,
        cluster=cluster,
        memory_limit=limit,
        keep_checkpoints=keep_checkpoints,
    )
    if before is not None and (differing := before.differences(options)):
        own = ", ".join(f"{each} {getattr(before, each)!r}" for each in differing)
        raise CannotSearch(f"the search in {where} has {own}; repeat its options, or give another --folder")
    if before is not None and before.trials > trials:
        options = replace(options, trials=before.trials)
    found = run_search(options, where, storage=storage, study=study, workers=workers, retrain=retrain, listen=progress)
    return Search(folder=where, results=found)


def _require_installed() -> None:
    from importlib.util import find_spec

    if find_spec("optuna") is None:
        raise CannotSearch("shoal search needs Optuna, which is not installed; run: pip install 'shoal[search]'")


def _require(method: str, trials: int, devices: int | None, rounds: int, better: str | None) -> None:
    if method not in METHODS:
        raise CannotSearch(f"--method {method}: expected {', '.join(METHODS)}{did_you_mean(method, METHODS)}")
    for option, value in (("trials", trials), ("devices", devices), ("rounds", rounds)):
        if value is not None and value < 1:
            raise CannotSearch(f"--{option} {value}: expected at least 1")
    if better not in (None, "lower", "higher"):
        raise CannotSearch(f"--better {better}: expected lower or higher")


def _require_objectives(method: str, cluster: str | None, limit: float | None) -> None:
    if cluster is not None and method not in SEVERAL_OBJECTIVES:
        raise CannotSearch(
            f"--cluster {cluster}: --method {method} looks at one objective; {', '.join(SEVERAL_OBJECTIVES)} weigh "
            "quality against predicted time and memory"
        )
    if limit is not None and cluster is None:
        raise CannotSearch("--memory-limit needs the cluster that memory is predicted for: add --cluster NAME")


def _bytes_of(given: str | float | None) -> float | None:
    from shoal.files.quantities import BadQuantity, size

    try:
        found = size(given) if isinstance(given, str) else given
    except BadQuantity as error:
        raise CannotSearch(f"--memory-limit {given}: {error}") from None
    if found is not None and not 0 < found < float("inf"):
        raise CannotSearch(f"--memory-limit {given}: expected more than nothing")
    return found


def _name_of(space: Any) -> str:
    """The name by which workers find a space."""
    if isinstance(space, (str, Path)):
        from shoal.job import names

        text = str(space)
        if not names.is_file(text):
            return text
        path, wanted = names.split_file(text)
        return f"{Path(path).expanduser().absolute()}:{wanted or 'space'}"
    name, file = getattr(space, "__qualname__", ""), None
    if callable(space):
        try:
            file = inspect.getsourcefile(space)
        except TypeError:
            file = None
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise CannotSearch(
            f"shoal.search was given {space!r}; workers load a space from its file: give a file's name, or a function "
            "that is defined at the top level of a file"
        )
    return f"{Path(file).absolute()}:{name}"


def _middle(name: str) -> tuple[Job, dict[str, Any]]:
    from shoal.job.space import load_space
    from shoal.searching.proposal import centre

    return centre(load_space(name))


def _objective(job: Job, metric: str | None, better: str | None) -> tuple[str, str]:
    target = job.target
    if metric is None:
        metric = target.metric if target is not None else "loss"
    if better is None and target is not None and target.metric == metric:
        better = target.better
    if better is None and metric in ("loss", "perplexity"):
        better = "lower"
    if better is None and metric == "accuracy":
        better = "higher"
    if better is None:
        raise CannotSearch(f"--metric {metric}: is higher or lower better? Add --better higher (or lower)")
    if job.validation is None:
        raise CannotSearch(f"job {job.name!r} has no validation data to compare trials by: Job(validation=...)")
    return metric, better
