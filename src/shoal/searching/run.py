"""A search from its options to its winner: the folder, the study, the workers, the retraining of the best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.searching.drive import drive
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.report import write_page
from shoal.searching.results import best_trial, results
from shoal.searching.study import local_storage, open_study, scheme
from shoal.searching.trial_run import drop_checkpoints
from shoal.searching.winner import train_winner
from shoal.training.record.run import read_json, write_json

SEARCH, RESULTS = "search.json", "results.json"
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
    options: SearchOptions,
    folder: Path,
    *,
    storage: str | None,
    study: str | None,
    workers: int,
    retrain: bool,
    listen: Listener,
) -> dict[str, Any]:
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
            message = {**message, "results": results(opened, options, complete=False)}
        listen(message)

    try:
        drive(options, opened, url=url, folder=folder, workers=workers, listen=pass_on)
    finally:  # Also of a search that was stopped.
        found = results(opened, options)
        write_page(found, folder)
    best = best_trial(opened)
    if best is None:
        raise CannotSearch(f"no trial finished: {next((row['reason'] for row in found['trials']), None)}")
    if retrain:
        found["winner"] = train_winner(opened, best, options, folder, listen=listen)
    if not options.keep_checkpoints:
        for place in (folder / "trials").glob("*"):
            drop_checkpoints(place)
    write_json(folder / RESULTS, found)
    write_page(found, folder)
    return found
