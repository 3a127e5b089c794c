"""What a run that goes on with another takes over from it: its job, and the options that were not given anew."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shoal.training.options import TrainOptions
from shoal.training.record.run import RUN, RunBroken, read_json

INHERITED = {
    "strategy": str,
    "size": str,
    "steps": int,
    "global_batch": int,
    "seed": int,
    "checkpoint_every": int,
    "growth": str,
    "scale_rule": str,
    "base_batch": int,
    "warmup": int,
    "evaluate_every": int,
    "checkpoint_minutes": float,
    "checkpoint_async": bool,
    "keep": int,
    "keep_best": int,
    "weights_only": bool,
    "patience": int,
    "monitor": str,
    "better": str,
    "min_delta": float,
    "log": str,
    "set": dict,
    "prefetch": int,
    "loader_threads": int,
    "loader_processes": int,
    "bucket_mb": float,
    "stop_at_target": bool,
}
"""What a resumed run takes from the run it goes on with, where nothing else was given."""
DEFAULTS = {each.name: each.default for each in fields(TrainOptions)}
EXPECTED = {str: "text", int: "a whole number", float: "a number", dict: "a table", bool: "true or false"}
OPTION = {"global_batch": "batch", "growth": "grow-batch"}


class CannotTrain(ValueError):
    """What was asked for cannot be carried out as it stands."""


def run_of(resume: str) -> Path | None:
    """The run folder in which what --resume names lies, if it lies in one."""
    path = Path(resume)
    if not path.is_dir():
        raise CannotTrain(f"--resume {resume}: there is no such folder; give a run's folder or one of its checkpoints")
    inside = [path, path.absolute().parent, path.absolute().parent.parent]
    return next((folder for folder in inside if (folder / "run.json").exists()), None)


def job_of(resume: str) -> str:
    """The job of the run that --resume names, where none was given."""
    run = run_of(resume)
    if run is None:
        raise CannotTrain(f"--resume {resume}: no run.json there, or above it, says which job it is of; give JOB too")
    job = _arguments(run).get("job")
    if not isinstance(job, str):
        raise RunBroken(f"{run / RUN} has the job {job!r}, but text was expected; repair it, or give JOB too")
    if job.startswith("object:"):
        raise CannotTrain(
            f"--resume {resume}: the run was of a Job object of another process; give it: shoal.train(job, resume=...)"
        )
    return job


def size_of(resume: str) -> Any:
    """The size of a built-in job in the run that is resumed; None if it has none."""
    run = run_of(resume)
    return None if run is None else _arguments(run).get("size")


def inherited(options: TrainOptions, run: Path | None) -> TrainOptions:
    """The options with what they leave out and the run has, of which a checkpoint is resumed."""
    folder = options.folder
    if folder is not None and (run is None or Path(folder).resolve() != run.resolve()):
        require_free(Path(folder))
    if run is None:
        return options
    before = _arguments(run)
    own: dict[str, Any] = {}
    for name, kind in INHERITED.items():
        value = before.get(name)
        if getattr(options, name) != DEFAULTS[name] or value is None:
            continue
        if name == "loader_processes" and options.loader_threads != DEFAULTS["loader_threads"]:
            continue  # Threads were asked for instead.
        if type(value) is not kind:
            expected = EXPECTED[kind]
            raise RunBroken(
                f"{run / RUN} has the {name} {value!r}, but {expected} was expected; "
                f"repair it, or give --{OPTION.get(name, name.replace('_', '-'))}"
            )
        own[name] = value
    return replace(options, folder=folder or str(run), **own)


def _arguments(run: Path) -> dict[str, Any]:
    found = read_json(run / RUN).get("arguments") or {}
    if not isinstance(found, dict):
        raise RunBroken(f"{run / RUN} is not the record of a run: its arguments are {found!r}")
    return found


def require_go_on(options: TrainOptions) -> None:
    """Refuses to go on with a run that is not named."""
    if options.folder is None:
        raise CannotTrain("--go-on resumes the run in a folder, or starts it there; name it: --folder runs/NAME")
    if options.resume is not None:
        raise CannotTrain(f"--go-on finds the checkpoint by itself; leave out --resume {options.resume}")


def can_go_on(folder: Path) -> bool:
    """Whether there is a checkpoint to go on from; those that are broken are found out later."""
    return any((folder / "checkpoints").glob("step-*/checkpoint.json"))


def require_free(folder: Path) -> None:
    """Refuses a folder that holds a run, or runs."""
    if (folder / "run.json").exists():
        raise CannotTrain(
            f"--folder {folder} holds a run already; resume it (--resume {folder}), or give another folder"
        )
    runs = sorted(path.parent.name for path in folder.glob("*/run.json"))
    if runs:
        raise CannotTrain(
            f"--folder {folder} is where runs are kept ({runs[0]} is one), not a run's own folder; "
            f"write --folder {folder / 'NAME'}, or leave --folder out for a new one below runs"
        )
