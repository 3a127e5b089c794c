"""`shoal submit`: prints what an engine needs to run a job, or sends it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.app import JOB, STRATEGY, app


@app.command(context_settings={"allow_extra_args": True})
def submit(
    context: typer.Context,
    job: Annotated[str, JOB],
    strategy: Annotated[str, STRATEGY],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes; they share the ranks of the strategy evenly.")],
    on: Annotated[str, typer.Option(help="Where: slurm, k8s or ray.")],
    send: Annotated[bool, typer.Option("--send", help="Submit it, instead of printing it.")] = False,
    folder: Annotated[
        str | None, typer.Option(help="The run's folder, which all nodes share (default: runs/NAME).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run (default: the job's).")] = None,
    cpus_per_rank: Annotated[int, typer.Option(min=1, help="Cores, and threads, of a rank.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of a node.")] = 0,
    minutes: Annotated[int | None, typer.Option(min=1, help="Time limit in minutes (default: the engine's).")] = None,
    retries: Annotated[int, typer.Option(min=0, help="Restarts after failures, under k8s (job) and ray.")] = 3,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option of sbatch: --sbatch=--partition=gpu. May be given again.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Under k8s: trainjob (Kubeflow Trainer v2) or job (Indexed Job, core API).")
    ] = "trainjob",
    image: Annotated[str | None, typer.Option(help="Under k8s: the container image.")] = None,
    claim: Annotated[str, typer.Option(help="Under k8s: the volume claim that all pods mount.")] = "shared",
    mount: Annotated[str, typer.Option(help="Under k8s: where pods mount it.")] = "/shared",
    secret: Annotated[str | None, typer.Option(help="Under k8s: Secret with key token (default: NAME-token).")] = None,
) -> None:
    """Run a job on a cluster: print the sbatch script, the manifest or the Ray driver, or --send it. Options of
    `shoal train` follow after --."""
    from shoal.api.submit import submit as prepare

    submission = prepare(
        job,
        strategy,
        on=on,
        nodes=nodes,
        folder=folder,
        name=name,
        cpus_per_rank=cpus_per_rank,
        gpus_per_node=gpus_per_node,
        minutes=minutes,
        retries=retries,
        sbatch=sbatch or (),
        kind=kind,
        image=image,
        claim=claim,
        mount=mount,
        secret=secret,
        options=context.args,
    )
    print(submission.send() if send else submission.text, end="\n" if send else "")
    sys.exit(0)
