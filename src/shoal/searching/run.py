"""A search from its options to its winner: the folder, the study, the workers, the retraining of the best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.searching.drive import drive
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.results import best_trial, lineage, results
from shoal.searching.study import local_storage, open_study, scheme
from shoal.searching.trial_run import drop_checkpoints, run_to, value_of
from shoal.training.record.run import read_json, write_json

if TYPE_CHECKING:
    from shoal.training.record.run import Run

SEARCH, RESULTS, WINNER = "search.json", "results.json", "winner"
Listener = Callable[[dict[str, Any]], None]


def stored(folder: Path) -> SearchOptions | None:
    """The options of the search in a folder."""
    file = folder / SEARCH
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise CannotSearch(f"--folder {folder} holds something else; give a new folder, or that of a search")
        return None
    found = read_json(file)
    try:
        return SearchOptions.from_json(found["options"])
    except (TypeError, KeyError) as error:
        raise CannotSearch(f"{file} is not the record of a search: {error}") from None


def run_search(
    options: SearchOptions, folder: Path, *, storage: str | None, study: str | None, workers: int, retrain: bool,
    listen: Listener,
) -> dict[str, Any]:  # fmt: skip
    """Searches, or goes on with the search in the folder; what it found.

    Raises:
        CannotSearch: It cannot be made as it stands; trials that ended are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    url, name = storage or local_storage(folder), study or folder.absolute().name
    opened = open_study(url, name, options)
    write_json(folder / SEARCH, {"options": options.to_json(), "study": name, "storage": scheme(url)})

    def pass_on(message: dict[str, Any]) -> None:
        if message["event"] in ("end", "begin", "rejected", "lost"):
            message = {**message, "results": results(opened, options)}
        listen(message)

    drive(options, opened, url=url, folder=folder, workers=workers, listen=pass_on)
    found = results(opened, options)
    best = best_trial(opened)
    if best is None:
        raise CannotSearch(f"no trial finished: {next((row['reason'] for row in found['trials']), None)}")
    if retrain:
        run = train_winner(lineage(opened, best, options), options, folder / WINNER, listen=listen)
        found["winner"] = {
            "folder": str(folder / WINNER), "value": value_of(run, options), "metrics": run.summary["metrics"]
        }
    if not options.keep_checkpoints:
        for place in (folder / "trials").glob("*"):
            drop_checkpoints(place)
    write_json(folder / RESULTS, found)
    return found


def train_winner(parts: list[tuple[int, str]], options: SearchOptions, folder: Path, *, listen: Listener) -> Run:
    """The best trial again, from its first step, with its checkpoints."""
    for steps, job in parts:
        run = run_to(
            job, options, folder, steps=steps,
            listen=lambda message: listen({**message, "winner": True, "total": parts[-1][0]}),
        )  # fmt: skip
    return run
