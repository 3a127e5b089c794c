"""Before ranks start: whether a job can be trained as asked, and the checkpoint that it would go on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.opening import open_checkpoint
from shoal.checkpoint.restore import find_intact, require_full
from shoal.checkpoint.rows import CheckpointBroken
from shoal.checkpoint.saved import Checkpoint
from shoal.job import Job
from shoal.job.work import flops_per_sample
from shoal.launch.agree import choose
from shoal.launch.devices import devices_here
from shoal.layout.layout import facts_of, layout_of
from shoal.parallel.runnable import require_runnable
from shoal.proof.gate_question import question, require_independent_once
from shoal.proof.resumable import require_resumable, require_state_averaged, require_state_in_pieces
from shoal.runtime.options import WrongOption
from shoal.runtime.setup import job_from, try_job
from shoal.strategy import Strategy, parse, require_legal
from shoal.strategy.islands import is_loose
from shoal.training.growing import grown, read_join
from shoal.training.monitor import Monitor, is_monitored
from shoal.training.options import TrainOptions
from shoal.training.record.loggers import require_loggers


class TrainingStopped(ValueError):
    """Training cannot go on; the message says at which step and what is kept."""


def check(options: TrainOptions, channel: Any) -> dict[str, Any]:
    """Refuses what cannot be trained, and reports what will be: the job's name and steps, the checkpoint to go on from,
    and what the gate has to check."""
    job, strategy = job_from(options), parse("serial" if options.strategy is None else options.strategy)
    values = try_job(job, strategy)
    layout = layout_of(job, strategy)
    facts = facts_of(job, layout)
    require_legal(strategy, facts=facts)
    for _, batch in job.growth:
        require_legal(strategy, facts=replace(facts, global_batch=batch))
    if (join := read_join(options.join)) is not None:
        require_legal(grown(strategy, join.replicas), facts=facts)
    require_runnable(
        strategy, elementwise=facts.elementwise_optimizer is not False, coupled=bool(facts.coupled_optimizer)
    )
    if len(job.train) < job.global_batch and channel is not None:
        text = f"a global batch of {job.global_batch} is larger than the data set of {len(job.train)} samples"
        each = "holds some samples several times" if job.last_batch == "wrap" else "is the full data set"
        channel.say(warning(f"{text}: each batch {each}; use a smaller batch or more data"))
    if options.backend is not None:
        choose(options.backend, [devices_here(0)], calibrated=None, emulates=False)
    resume = options.resume
    if resume is not None:
        checkpoint = resume_point(Path(resume), warn=lambda text: channel.say(warning(text)))
        require_job_of(checkpoint, job)
        resume = str(checkpoint.path)
    require_loggers(options.log)
    monitor = Monitor(options, job)
    monitor.require_sense(job, job.evaluate_every, values)
    _require_checkpoints(options, strategy)
    if options.checkpoint_every != 0 or options.checkpoint_minutes or options.keep_best:
        require_resumable(job)
    require_state_in_pieces(job, strategy, layout.chain)
    require_state_averaged(job, strategy)
    asked = question(job, strategy, facts, backend=options.backend) if options.gate else None
    if options.gate:
        for message in require_independent_once(job, strategy, facts, asked, backend=options.backend):
            channel.say(message)
    return {
        "job": job.name,
        "steps": job.steps,
        "seed": job.seed,
        "resume": resume,
        "question": asked,
        "flops_per_sample": flops_per_sample(job),
    }


def _require_checkpoints(options: TrainOptions, strategy: Strategy) -> None:
    """Refuses ways to write checkpoints that need ranks that step together."""
    loose = next((level for level in strategy.dp_levels if is_loose(level)), None)
    for option, given in (("async", options.checkpoint_async), ("minutes", options.checkpoint_minutes)):
        if given and loose is not None:
            raise WrongOption(
                f"--checkpoint-{option}: {loose} makes islands that save when they exchange; use --checkpoint-every"
            )


def resume_point(path: Path, *, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint at a path, or the newest intact one of the run there. All ranks call it alike."""
    if (path / "checkpoint.json").exists() or path.name.startswith("step-"):
        named = open_checkpoint(path)
        require_full(named)
        return named
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    found = find_intact(folder, warn=warn)
    if found is None:
        raise TrainingStopped(
            f"--resume {path}: there is no intact checkpoint in {folder}; start anew without --resume"
        )
    require_full(found)
    return found


def warning(text: str) -> dict[str, Any]:
    """The message that carries a warning to whoever started the run."""
    return {"event": "warning", "text": text}


def require_job_of(checkpoint: Checkpoint, job: Job) -> None:
    """Refuses a checkpoint of another job, or of another order of the data."""
    of = checkpoint.progress
    for key, types in (("job", (str,)), ("seed", (int,)), ("counter", (int,)), ("train_s", (int, float))):
        if type(of.get(key)) not in types or (key in ("counter", "train_s") and not 0 <= of[key] < 2**62):
            raise CheckpointBroken(f"{checkpoint.path} is no checkpoint of a run: its {key} is {of.get(key)!r}")
    if not is_monitored(of.get("monitor", {})) or not isinstance(of.get("ended"), str | None):
        raise CheckpointBroken(f"{checkpoint.path} is no checkpoint of a run: what it says of early stopping is broken")
    numbers = {key: of.get(key) for key in ("loss", "reached_s", "reached_step", "evaluated_step")}
    metrics = of.get("metrics", {})
    if type(metrics) is not dict:
        raise CheckpointBroken(f"{checkpoint.path} is no checkpoint of a run: its metrics is {metrics!r}")
    for key, value in {**numbers, **metrics}.items():
        if value is not None and type(value) not in (int, float):
            raise CheckpointBroken(f"{checkpoint.path} is no checkpoint of a run: its {key} is {value!r}")
    if of["job"] != job.name or of["seed"] != job.seed:
        raise TrainingStopped(
            f"{checkpoint.path} is of job {of['job']!r} with seed {of['seed']}, but this is job {job.name!r} "
            f"with seed {job.seed}; resume with the job it was saved from"
        )
