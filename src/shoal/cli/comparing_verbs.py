"""Verbs that compare runs, with their options."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.app import JSON, app


@app.command()
def compare(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB...", help="Python files or built-in tasks.")] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help="Strategies and frameworks, several after one --with: 'dp(2)' torch-ddp."),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 1,2.")] = "2",
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each contestant (default: 3).")] = None,
    steps: Annotated[int | None, typer.Option(min=4, help="Steps of a run (default: the job's).")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch (default: the job's).")] = None,
    per_rank: Annotated[bool, typer.Option("--per-rank", help="The batch is that of one rank: weak scaling.")] = False,
    evaluate_every: Annotated[int | None, typer.Option(min=1, help="Steps between evaluations.")] = None,
    emulate: Annotated[
        str | None, typer.Option(help='A slower cluster for Shoal\'s strategies: "2x1, 10us, 20GB/s | 100us, 50Mb/s".')
    ] = None,
    folder: Annotated[str | None, typer.Option(help="Runs and report; the same comparison in it is resumed.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The tiny tasks, few steps, no further packages.")] = False,
    preset: Annotated[
        str | None, typer.Option(help="survey: all its classes of parallelism, beside its machines as simulated.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Begin no run after this time; the same command goes on.")
    ] = None,
    frameworks: Annotated[bool, typer.Option("--frameworks", help="List the frameworks, and which run here.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Train jobs by strategies and by other frameworks under one protocol, and write a report."""
    if frameworks:
        from shoal.cli.frameworks import frameworks_command

        sys.exit(frameworks_command(as_json=as_json))
    from shoal.cli.compare import compare_command

    sys.exit(
        compare_command(
            jobs or [],
            contestants=with_ or [],
            ranks=ranks,
            seeds=seeds,
            steps=steps,
            batch=batch,
            per_rank=per_rank,
            evaluate_every=evaluate_every,
            emulate=emulate,
            folder=folder,
            quick=quick,
            preset=preset,
            minutes=minutes,
            as_json=as_json,
        )
    )


@app.command()
def report(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or of one comparison.")],
    to: Annotated[str | None, typer.Option(help="Folder of the report.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Write a page that works offline, and the figures as JSON, CSV and Markdown, of any runs."""
    from shoal.cli.compare import report_command

    sys.exit(report_command(folders, to=to, as_json=as_json))


@app.command()
def runs(
    folder: Annotated[str, typer.Argument(help="Where runs are kept.")] = "runs",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """List runs with their key figures, newest first."""
    from shoal.cli.compare import runs_command

    sys.exit(runs_command(folder, as_json=as_json))


def with_repeated(words: list[str]) -> list[str]:
    """The command line with `--with a b` written as `--with a --with b`, which is what the parser takes."""
    found, inside = [], False
    for word in words:
        if word == "--with":
            inside = True
        elif word.startswith("--"):
            inside = False
            found.append(word)
        else:
            found += ["--with", word] if inside else [word]
    return found
