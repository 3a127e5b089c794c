"""Verbs that run ranks or read what they left, with their options.

Nothing heavy is imported until a verb needs it, so help answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.app import (
    BATCH,
    CONFIG,
    JOB,
    JOB_OR_RESUMED,
    JSON,
    SEED,
    SET,
    SIZE,
    START_FROM,
    STRAGGLER,
    STRATEGY,
    app,
)


@app.command()
def train(
    job: Annotated[str | None, JOB_OR_RESUMED] = None,
    strategy: Annotated[str | None, STRATEGY] = None,
    size: Annotated[str | None, SIZE] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Expected number of ranks (must match the strategy).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of the job's own number.")] = None,
    batch: Annotated[int | None, BATCH] = None,
    grow_batch: Annotated[
        str | None, typer.Option(help='Grow the global batch: "samples:batch, ...", such as "2000:48, 6000:96".')
    ] = None,
    scale_rule: Annotated[
        str | None, typer.Option(help="Scale the learning rate with the batch: linear or sqrt (docs/large_batches.md).")
    ] = None,
    base_batch: Annotated[
        int | None, typer.Option(min=1, help="The batch that the rate was tuned for (default: the job's own).")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps in which a scaled rate is reached (default: a twentieth of all).")
    ] = None,
    seed: Annotated[int | None, SEED] = None,
    set_: Annotated[list[str] | None, SET] = None,
    config: Annotated[str | None, CONFIG] = None,
    folder: Annotated[
        str | None, typer.Option(help="Where the run is recorded (default: a new folder in runs/).")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="A run's folder or a checkpoint to go on from, by default with its job and options."),
    ] = None,
    start_from: Annotated[str | None, START_FROM] = None,
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Resume the run in --folder, or start it if there is none yet.")
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between checkpoints; 0 writes none.")
    ] = None,
    checkpoint_minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Minutes between checkpoints, besides those by steps.")
    ] = None,
    checkpoint_async: Annotated[
        bool, typer.Option("--checkpoint-async", help="Write checkpoints from a copy while training goes on.")
    ] = False,
    keep: Annotated[int | None, typer.Option(min=1, help="Newest checkpoints to keep (default: 2).")] = None,
    keep_best: Annotated[
        int | None, typer.Option(min=0, help="Keep also the checkpoints of the N best evaluations.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave the optimiser's state out of checkpoints (not resumable).")
    ] = False,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of evaluations without improvement.")
    ] = None,
    monitor: Annotated[
        str | None, typer.Option(help="Value for --patience and --keep-best (default: the target's, or loss).")
    ] = None,
    better: Annotated[str | None, typer.Option(help="Whether lower or higher values of --monitor are better.")] = None,
    min_delta: Annotated[float | None, typer.Option(min=0.0, help="Least change that counts as improvement.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=0, help="Steps between evaluations; 0: at the end.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Write a Chrome/Perfetto trace of some steps.")] = False,
    log: Annotated[
        list[str] | None, typer.Option(help="Write curves also to csv, wandb or mlflow. May be given again.")
    ] = None,
    prefetch: Annotated[int, typer.Option(min=0, help="Steps whose batches are read while one computes; 0: none.")] = 0,
    loader_threads: Annotated[int, typer.Option(min=1, help="With --prefetch: threads that read, on each rank.")] = 1,
    loader_processes: Annotated[
        int, typer.Option(min=0, help="Processes that read instead, on each rank, for slow Python code.")
    ] = 0,
    bucket_mb: Annotated[
        float | None, typer.Option(min=0.0, help="Most megabytes of a bucket of gradients (default: 8).")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Run all steps even if the target is reached early.")] = False,
    hang_after: Annotated[
        float, typer.Option(min=1.0, help="Seconds without progress after which a late rank is named.")
    ] = 300.0,
    backend: Annotated[
        str | None, typer.Option(help="shoal, gloo or the accelerator's, such as nccl (default: by the devices here).")
    ] = None,
    emulate: Annotated[
        str | None, typer.Option(help='Behave like a slower cluster: "4x2, 10us, 20GB/s | 100us, 1Gb/s".')
    ] = None,
    straggler: Annotated[list[str] | None, STRAGGLER] = None,
    fail: Annotated[
        list[str] | None, typer.Option(help='Kill a rank on purpose: "rank 3 at step 40". May be given again.')
    ] = None,
    rejoin: Annotated[
        bool, typer.Option("--rejoin", help="Start a killed rank again where the others go on; it joins them.")
    ] = False,
    join: Annotated[
        str | None, typer.Option(help='Let further replicas join while others train: "2 at step 40".')
    ] = None,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Do not check a strategy by two steps in float64 before its first use.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Train a job under a strategy: live progress, a run folder, checkpoints."""
    from shoal.api.settings import parse_settings
    from shoal.api.train import TrainOptions, job_of
    from shoal.cli.train import train_command

    if job is None and resume is None:
        raise typer.BadParameter("give a Python file that defines a job, or --resume RUN", param_hint="JOB")
    job = job_of(resume or "") if job is None else job
    options = TrainOptions(
        job=job,
        strategy=strategy,
        size=size,
        steps=steps,
        global_batch=batch,
        seed=seed,
        folder=folder,
        resume=resume,
        set=parse_settings(set_),
        growth=grow_batch,
        scale_rule=scale_rule,
        base_batch=base_batch,
        warmup=warmup,
        go_on=go_on,
        start_from=start_from,
        checkpoint_every=checkpoint_every,
        trace=trace,
        stop_at_target=not full,
        backend=backend,
        gate=not no_gate,
        checkpoint_minutes=checkpoint_minutes,
        checkpoint_async=checkpoint_async,
        keep=keep or 2,
        keep_best=keep_best or 0,
        weights_only=weights_only,
        patience=patience,
        monitor=monitor,
        better=better,
        prefetch=prefetch,
        loader_threads=loader_threads,
        loader_processes=loader_processes,
        bucket_mb=bucket_mb,
        min_delta=min_delta or 0.0,
        evaluate_every=evaluate_every,
        log=", ".join(log or ()) or None,
        emulate=emulate,
        straggler="; ".join(straggler or ()) or None,
        fail="; ".join(fail or ()) or None,
        rejoin=rejoin,
        join=join,
    )
    sys.exit(train_command(options, ranks=ranks, hang_after_s=hang_after, as_json=as_json))


@app.command()
def verify(
    job: Annotated[str, JOB],
    strategy: Annotated[str, STRATEGY],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps to compare.")] = 10,
    size: Annotated[str | None, SIZE] = None,
    batch: Annotated[int | None, BATCH] = None,
    seed: Annotated[int | None, SEED] = None,
    start_from: Annotated[str | None, START_FROM] = None,
    set_: Annotated[list[str] | None, SET] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Prove that a strategy trains the same model as one process does, or report how far it differs."""
    from shoal.api.settings import parse_settings
    from shoal.cli.verify import verify_command

    changed = {"global_batch": batch, "seed": seed, "start_from": start_from, "set": parse_settings(set_)}
    sys.exit(verify_command(job, strategy, steps=steps, size=size, changed=changed, as_json=as_json))


@app.command()
def calibrate(
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Ranks to measure with (default: one a core, from 2 to 4).")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(help="Where to write (default: $SHOAL_CALIBRATION, or ~/.config/shoal/calibration.toml)."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and rounds: a few seconds, rough figures.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write the figures also if other programs had most of the cores.")
    ] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Collectives and links only; what was measured of the machine stays.")
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="ROWS.csv", help="Measure nothing: fit a framework profile to 30 or more measured steps."
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="With --from: the known profile to start from (default: the rows' framework).")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Measure this machine in about a minute: matrix products and other operators, memory, collectives by backend
    (shoal, gloo), what messages cost inside and between hosts, the engine's overheads. Jobs started here then take the
    fastest backend and the cheapest algorithms, and `shoal plan --cluster this` knows it. Run it while the machine is
    idle; under torchrun it measures the links between its hosts."""
    if rows is not None:
        from shoal.cli.learn_profile import learn_command

        sys.exit(learn_command(rows, start=start, output=output, as_json=as_json))
    if start is not None:
        raise typer.BadParameter("it goes with --from ROWS.csv", param_hint="--start")
    from shoal.cli.calibrate import calibrate_command

    sys.exit(calibrate_command(ranks=ranks, output=output, quick=quick, force=force, links=links, as_json=as_json))


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or of one of its checkpoints.")],
    to: Annotated[
        str,
        typer.Option(help="A file (model.safetensors, model.pt) or a format: safetensors, state_dict, hf-folder, dcp."),
    ] = "safetensors",
    out: Annotated[str | None, typer.Option(help="Where a format is written (default: in RUN/export).")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point tensors: fp32, bf16, fp16 or fp64.")] = None,
    job: Annotated[str | None, typer.Option(help="The job's file, if it was moved since the run.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average of the weights (Job.ema).")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what lies at the path.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Write the trained model as files that need nothing of Shoal."""
    from shoal.cli.export import export_command

    sys.exit(
        export_command(
            run, to=to, out=out, step=step, dtype=dtype, ema=ema, job=job, overwrite=overwrite, as_json=as_json
        )
    )


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or of one of its checkpoints.")],
    strategy: Annotated[
        str | None, typer.Option("--strategy", "-s", help="How to spread the model over ranks (default: serial).")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average of the weights (Job.ema).")] = False,
    job: Annotated[str | None, typer.Option(help="The job's file, if it was moved since the run.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compute the validation metrics of a trained model."""
    from shoal.cli.evaluate import evaluate_command

    sys.exit(evaluate_command(run, strategy_text=strategy, step=step, ema=ema, job=job, as_json=as_json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script with a training loop of its own.")],
    ranks: Annotated[int, typer.Option(help="Processes to start on this machine.")] = 2,
    port: Annotated[int | None, typer.Option(help="Port of the rendezvous on loopback (default: a free one).")] = None,
) -> None:
    """Start a script of your own on several local ranks. Arguments after the script name are passed to the script."""
    from shoal.launch.script import launch_script

    sys.exit(launch_script(script, context.args, ranks=ranks, port=port))


@app.command()
def demo() -> None:
    """All of it in about two minutes: explain, verify, train and compare on both built-in tasks."""
    from shoal.cli.demo import run_demo

    sys.exit(run_demo())
