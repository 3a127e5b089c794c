"""The command line's app, and the options that several verbs have."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(
    name="shoal",
    help="Train one neural network on many machines by any technique of distributed deep learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JOB = typer.Argument(
    metavar="JOB",
    help="A Python file that defines `job`, or a built-in task: language, image (image:resnet:small).",
)
JOB_OR_RESUMED = typer.Argument(
    metavar="JOB",
    show_default=False,
    help="A Python file that defines `job`, or a built-in task; with --resume, by default that of the run.",
)
STRATEGY = typer.Option("--strategy", "-s", help="How to train, for example 'dp(2, zero=3)'.")
SIZE = typer.Option("--size", help="Size of a built-in task: tiny, small, or a real shape.")
BATCH = typer.Option(min=1, help="Global batch, instead of the job's own.")
SEED = typer.Option(min=0, help="Seed, instead of the job's own.")
STRAGGLER = typer.Option(help='Slow ranks: "rank 2: 3x", "random 10%: 5x", "all: 20 ms". May be given again.')
START_FROM = typer.Option(help="Weights to start with: safetensors, a state_dict or dcp folder (docs/weights.md).")
SET = typer.Option(
    "--set",
    metavar="NAME=VALUE",
    help="Change a value of the job or an option of its optimiser: lr=3e-4, clip=1.0. May be given again.",
)


def _from_config(context: typer.Context, path: str | None) -> str | None:
    """Makes the options of a file the defaults of this command; what the command line says comes first."""
    if path is not None:
        from shoal.api.settings import read_config

        names = {
            next((word[2:].replace("-", "_") for word in each.opts if word.startswith("--")), each.name): each.name
            for each in context.command.params
            if each.name is not None
        }
        given = read_config(path, names)
        if "set" in given:
            given["set"] = [f"{name}={json.dumps(value)}" for name, value in given["set"].items()]
        context.default_map = {names[name]: value for name, value in given.items()}
    return path


CONFIG = typer.Option(
    "--config",
    metavar="FILE.toml",
    is_eager=True,
    callback=_from_config,
    help="Options from a file; those of the command line come first.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from shoal import __version__

        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    pass


JSON = typer.Option("--json", help="One JSON object on standard output.")
