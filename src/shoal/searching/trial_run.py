"""One trial as runs of a job: to each rung from the one before, in one folder, with checkpoints. A trial that was lost
goes on from the newest; a member of a population begins with a copy of its parent's.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import checkpoints
from shoal.launch import RankFailed
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.training.local import CannotTrain, train_job
from shoal.training.record.lock import FolderBusy
from shoal.training.record.run import Run

Listener = Callable[[dict[str, Any]], None]
BUSY_S = 30.0
"""For the ranks of a killed worker to be gone."""


class TrialFailed(Exception):
    """This point of the space cannot be trained; others may."""


class TrialDiverged(TrialFailed):
    """Its loss is no number any more: a bad point, of which samplers learn."""


class TrialStopped(KeyboardInterrupt):
    """The user asked the search to stop; a checkpoint was written."""


def folder_of(folder: Path, number: int) -> Path:
    """Where the run of a trial is recorded."""
    return folder / "trials" / f"{number:04d}"


def run_to(job: str, options: SearchOptions, folder: Path, *, steps: int, listen: Listener) -> Run:
    """Trains a point to a step, from the newest checkpoint in the folder if there is one."""
    began = time.monotonic()
    while True:
        try:
            run = train_job(
                job,
                options.strategy,
                folder=folder,
                go_on=True,
                steps=steps,
                seed=options.seed,
                evaluate_every=0,
                stop_at_target=False,
                keep=1,
                checkpoint_every=max(1, math.ceil(options.steps / 4)),
                on_message=listen,
            )
        except CannotTrain as error:
            if isinstance(error.__cause__, FolderBusy) and time.monotonic() - began < BUSY_S:
                time.sleep(0.2)
                continue
            raise TrialFailed(str(error)) from error
        except RankFailed as error:
            kind = TrialDiverged if error.for_user else TrialFailed
            raise kind(str(error)) from error
        if run.status == "stopped":
            raise TrialStopped
        return run


def value_of(run: Run, options: SearchOptions) -> float:
    """What the search compares."""
    metrics = run.summary.get("metrics") or {}
    if options.metric not in metrics:
        known = ", ".join(metrics) or "none; give the job validation data"
        raise CannotSearch(f"--metric {options.metric}: the validation values are {known}")
    found = metrics[options.metric]
    if found is None or not math.isfinite(found):
        raise TrialDiverged(f"its {options.metric} is {found}")
    return float(found)


def begin_with_copy(parent: Path, folder: Path) -> None:
    """Copies the newest checkpoint of another run, if this one has none yet."""
    if checkpoints(folder / "checkpoints"):
        return
    known = checkpoints(parent / "checkpoints")
    if not known:
        raise TrialFailed(f"{parent} has no checkpoint to go on from")
    _, newest = known[-1]
    place = folder / "checkpoints" / newest.name
    unfinished = place.with_name(f"{newest.name}.copying")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(newest, unfinished)
    unfinished.rename(place)


def drop_checkpoints(folder: Path) -> None:
    """Frees the space of a run whose figures are all that is still needed."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
