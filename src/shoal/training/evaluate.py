"""`shoal evaluate`: the validation metrics of a trained model, on one rank or under any strategy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.runtime.options import JobOptions


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(JobOptions):
    """Which checkpoint of which job."""

    run: str
    """The folder of a run, or of one checkpoint."""
    step: int | None = None
    """The checkpoint of this step; None: the newest."""
    ema: bool = False
    """Whether the moving average of the weights is evaluated."""
    strategy: str = "serial"
    """How the model is spread over ranks while it is evaluated."""


def evaluate_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: the metrics of a checkpoint, the same on all of them."""
    from shoal.checkpoint.restore import restore
    from shoal.exporting.trained import checkpoint_of
    from shoal.job import JobError
    from shoal.launch.join import join, leave
    from shoal.launch.watch import beat
    from shoal.runtime.setup import job_from, prepare
    from shoal.strategy import parse
    from shoal.training.check import require_job_of

    options = EvaluateOptions.from_json(arguments)
    me = join()
    job = job_from(options)
    if job.validation is None:
        raise JobError(f"job {job.name!r} has no validation data; give it some: Job(..., validation=...)")
    checkpoint = checkpoint_of(Path(options.run), options.step, ema=options.ema)
    require_job_of(checkpoint, job)
    ready = prepare(job, parse(options.strategy), rank=me.rank, backend=me.backend, device=me.device)
    restore(ready.engine, checkpoint, weights_only=True)
    with ready.engine.consensus():
        metrics = ready.runner.evaluate(watch=beat)
    leave()
    return {"job": job.name, "step": checkpoint.step, "samples": len(job.validation), "metrics": metrics}
