"""The command line's app, and the options that several verbs have."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="shoal",
    help="Train one neural network on many machines by any technique of distributed deep learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

JOB = typer.Argument(
    metavar="JOB",
    help="A Python file that defines `job`, or a built-in task: language, image (image:resnet:small).",
)
STRATEGY = typer.Option("--strategy", "-s", help="How to train, for example 'dp(2, zero=3)'.")
SIZE = typer.Option("--size", help="Size of a built-in task: tiny, small, or a real shape.")
BATCH = typer.Option(min=1, help="Global batch, instead of the job's own.")
SEED = typer.Option(min=0, help="Seed, instead of the job's own.")
STRAGGLER = typer.Option(help='Slow ranks: "rank 2: 3x", "random 10%: 5x", "all: 20 ms". May be given again.')
START_FROM = typer.Option(help="Weights to start with: safetensors, a state_dict or dcp folder (docs/weights.md).")
JSON = typer.Option("--json", help="One JSON object on standard output.")
