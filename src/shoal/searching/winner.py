"""The best trial, trained again from its first step; its weights as a file, and as an artifact of Optuna's study."""

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

WINNER, ARTIFACTS = "winner", "artifacts"
Listener = Callable[[dict[str, Any]], None]


def train_winner(
    study: Study, best: FrozenTrial, options: SearchOptions, folder: Path, *, listen: Listener
) -> dict[str, Any]:
    """Trains and saves it; where, and what it reached."""
    place = folder / WINNER / f"{origin(best):04d}"  # More trials may find another.
    parts = lineage(study, best, options)
    for steps, job in parts:
        run = run_to(
            job,
            options,
            place,
            steps=steps,
            listen=lambda message: listen({**message, "winner": True, "total": parts[-1][0]}),
        )
    weights = place / f"trial-{origin(best)}.safetensors"
    _save(run, parts[-1][1], weights)
    _offer(study, weights, folder)
    return {
        "folder": str(place),
        "value": value_of(run, options),
        "metrics": run.summary["metrics"],
        "weights": str(weights),
        "trial": best.number,
    }


def _save(run: Run, job: str, path: Path) -> None:
    """The weights, as full tensors whatever the strategy."""
    export(checkpoint_of(run.folder), build_without_memory(load_job(job)), "safetensors", path, overwrite=True)


def _offer(study: Study, weights: Path, folder: Path) -> None:
    """As an artifact of the study, once: a trial that has ended takes none."""
    known = get_all_artifact_meta(study)
    if any(each.filename == weights.name for each in known):
        return
    (folder / ARTIFACTS).mkdir(exist_ok=True)
    store = FileSystemArtifactStore(folder / ARTIFACTS)
    upload_artifact(artifact_store=store, file_path=str(weights), study_or_trial=study)
