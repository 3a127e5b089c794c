"""From a run's folder to its job and its checkpoint, and to the trained model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.files import checkpoints
from shoal.checkpoint.opening import open_checkpoint
from shoal.checkpoint.rows import CheckpointBroken
from shoal.checkpoint.saved import Checkpoint
from shoal.exporting.weights import CannotExport, full_state, tensors_of
from shoal.job import Job
from shoal.runtime.options import JobOptions
from shoal.runtime.setup import job_from
from shoal.runtime.step import build_model


def checkpoint_of(run: Path, step: int | None = None, *, ema: bool = False) -> Checkpoint:
    """The newest intact checkpoint of a run, or that of a step; `run` may also be a checkpoint itself. `ema`: its
    parameters are read from their moving average."""
    found = _checkpoint_of(run, step)
    if ema and not found.has_average:
        raise CannotExport(f"--ema: {found.path} has no moving average of the weights; train with Job(ema=0.999)")
    found.averaged = ema
    return found


def _checkpoint_of(run: Path, step: int | None) -> Checkpoint:
    run = Path(run)
    if run.name.startswith("step-"):
        return open_checkpoint(run)
    found = checkpoints(run / "checkpoints")
    if not found and (run / "member-0").is_dir():
        inside = ", ".join(sorted(path.name for path in run.iterdir() if (path / "run.json").exists()))
        raise CannotExport(f"{run} is an ensemble: name one of its runs ({inside}), such as {run / 'member-0'}")
    if not found:
        raise CannotExport(f"{run} has no checkpoint; train with checkpoints (--checkpoint-every other than 0)")
    if step is not None:
        chosen = next((path for number, path in found if number == step), None)
        if chosen is None:
            raise CannotExport(f"--step {step}: {run} has checkpoints of {', '.join(str(n) for n, _ in found)}")
        return open_checkpoint(chosen)
    broken = None
    for _, path in reversed(found):
        try:
            return open_checkpoint(path)
        except CheckpointBroken as error:
            broken = error
    raise CannotExport(f"{run} has no intact checkpoint: {broken}")


def full_weights(path: str | Path, *, ema: bool = False) -> dict[str, torch.Tensor]:
    """The full parameters and buffers of a checkpoint, by name.

    Args:
        path: The folder of a run, of checkpoints (`engine.save`), or of one of them.
        ema: Whether to take the moving average of the weights.

    Returns:
        {name: tensor}; of a tied parameter the first of its names.

    Example:
        model.load_state_dict(shoal.load_weights("kept"), strict=False)
    """
    path = Path(path)
    if not path.name.startswith("step-") and checkpoints(path):
        path = checkpoints(path)[-1][1]
    checkpoint = checkpoint_of(path, ema=ema)
    found = checkpoint.buffers()
    for name, full in checkpoint.parameters.items():
        found[name] = checkpoint.read_parameter(name, 0, prod(full.shape)).reshape(full.shape)
    return found


def run_folder(path: Path) -> Path:
    """The folder of the run that a path names, or that the checkpoint there belongs to."""
    return path.parent.parent if path.name.startswith("step-") and path.parent.name == "checkpoints" else path


def options_of(arguments: Mapping[str, Any], job: str | None = None) -> JobOptions:
    """The job of a run, from what its record keeps; `job` names it where its file was moved."""
    known = {each.name for each in fields(JobOptions)}
    given = {name: value for name, value in arguments.items() if name in known and name != "start_from"}
    if job is not None:
        given["job"] = job
    if not isinstance(given.get("job"), str):
        raise CannotExport("the record of the run does not say which job was trained; name it with --job")
    return JobOptions.from_json(given)


def require_same_job(checkpoint: Checkpoint, job: Job) -> None:
    trained = checkpoint.progress.get("job")
    if trained != job.name:
        raise CannotExport(f"{checkpoint.path} is of job {trained!r}, but {job.name!r} was given; name it with --job")


def trained_model(checkpoint: Checkpoint, options: JobOptions) -> nn.Module:
    """The job's model with the trained weights, in evaluation mode: a plain `nn.Module` in this process."""
    job = job_from(options)
    require_same_job(checkpoint, job)
    model = build_model(job)
    model.load_state_dict(full_state(checkpoint, tensors_of(checkpoint, model)))
    return model.eval()
