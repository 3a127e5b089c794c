"""The verb that searches, with its options."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.app import CONFIG, JSON, app


@app.command()
def search(
    space: Annotated[
        str,
        typer.Argument(
            metavar="SPACE",
            help="A Python file with a function space(trial) that returns a Job, or language, image (image:small).",
        ),
    ],
    method: Annotated[
        str, typer.Option("--method", "-m", help="random, tpe, halving, evolution, pbt or darts.")
    ] = "tpe",
    trials: Annotated[int, typer.Option(min=1, help="Jobs to train; of pbt the members of the population.")] = 20,
    devices: Annotated[
        int | None, typer.Option("--devices", "-n", min=1, help="Devices of this machine (default: its cores).")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            help="How each trial is trained (default: few wide or many narrow ones, by a prediction).",
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Validation value to compare (default: that of the job's target, or the loss).")
    ] = None,
    better: Annotated[str | None, typer.Option(help="lower or higher (default: as the target says).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search and of every trial's training.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a full trial (default: the job's).")] = None,
    population: Annotated[
        int | None, typer.Option(min=2, help="Evolution: models that may have children (default: a quarter).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="PBT: parts of a trial between copies.")] = 4,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            help="Also search for predicted step time and memory there: a preset such as "
            "dgx-a100, a TOML file, or this.",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --cluster: memory of a device that every model must be predicted to "
            'fit, "8 GB" (default: what the device has).',
        ),
    ] = None,
    folder: Annotated[str | None, typer.Option(help="Study and runs; the same search in it is resumed.")] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="A database for several machines: postgresql+psycopg://...")
    ] = None,
    study: Annotated[str | None, typer.Option(help="Name in the database (default: the folder's).")] = None,
    retrain: Annotated[bool, typer.Option(help="Train the best again, and keep it.")] = True,
    keep_checkpoints: Annotated[bool, typer.Option("--keep-checkpoints", help="Keep those of all trials.")] = False,
    config: Annotated[str | None, CONFIG] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Search architectures and hyper-parameters: trials in parallel, each a job under a strategy."""
    from shoal.cli.search import search_command

    sys.exit(
        search_command(
            space,
            as_json=as_json,
            method=method,
            trials=trials,
            devices=devices,
            strategy=strategy,
            metric=metric,
            better=better,
            seed=seed,
            steps=steps,
            population=population,
            rounds=rounds,
            cluster=cluster,
            memory_limit=memory_limit,
            folder=folder,
            storage=storage,
            study=study,
            retrain=retrain,
            keep_checkpoints=keep_checkpoints,
        )
    )
