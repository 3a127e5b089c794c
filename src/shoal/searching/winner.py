"""The best trial, trained again from its first step, and its weights as a file that Optuna's dashboard offers, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact
from optuna.trial import FrozenTrial

from shoal.exporting.formats import export
from shoal.exporting.trained import checkpoint_of
from shoal.job.facts import build_without_memory
from shoal.job.load import load_job
from shoal.searching.options import SearchOptions
from shoal.searching.results import lineage
from shoal.searching.study import origin
from shoal.searching.trial_run import run_to, value_of

if TYPE_CHECKING:
    from optuna.study import Study

    from shoal.training.record.run import Run

WINNER, ARTIFACTS, WEIGHTS = "winner", "artifacts", "model.safetensors"
Listener = Callable[[dict[str, Any]], None]


def train_winner(
    study: Study, best: FrozenTrial, options: SearchOptions, folder: Path, *, listen: Listener
) -> dict[str, Any]:
    """Trains and saves it; where, and what it reached."""
    place = folder / WINNER / f"{origin(best):04d}"  # More trials may find another.
    parts = lineage(study, best, options)
    for steps, job in parts:
        run = run_to(
            job, options, place, steps=steps,
            listen=lambda message: listen({**message, "winner": True, "total": parts[-1][0]}),
        )  # fmt: skip
    weights = _save(run, parts[-1][1], place)
    _offer(study, best, weights, folder)
    return {
        "folder": str(place), "value": value_of(run, options), "metrics": run.summary["metrics"],
        "weights": str(weights), "trial": best.number,
    }  # fmt: skip


def _save(run: Run, job: str, place: Path) -> Path:
    """The weights, with full tensors whatever the strategy."""
    path = place / WEIGHTS
    export(checkpoint_of(run.folder), build_without_memory(load_job(job)), "safetensors", path, overwrite=True)
    return path


def _offer(study: Study, best: FrozenTrial, weights: Path, folder: Path) -> None:
    """As an artifact of the trial, once."""
    known = get_all_artifact_meta(best, storage=study._storage)
    if any(each.filename == weights.name for each in known):
        return
    (folder / ARTIFACTS).mkdir(exist_ok=True)
    store = FileSystemArtifactStore(folder / ARTIFACTS)
    upload_artifact(artifact_store=store, file_path=str(weights), study_or_trial=best, storage=study._storage)
