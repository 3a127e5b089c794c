"""The verbs that read a run: export and evaluate."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.verbs import JSON, app


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or of one of its checkpoints.")],
    to: Annotated[
        str,
        typer.Option(help="A file (model.safetensors, model.pt) or a format: safetensors, state_dict, hf-folder, dcp."),
    ] = "safetensors",
    out: Annotated[str | None, typer.Option(help="Where a format is written (default: in RUN/export).")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Convert floating-point tensors: fp32, bf16, fp16 or fp64.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="The job's file, if it was moved since the run.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what lies at the path.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Write the trained model as files that need nothing of Shoal."""
    from shoal.cli.export import export_command

    sys.exit(
        export_command(run, to=to, out=out, step=step, dtype=dtype, job=job, overwrite=overwrite, as_json=as_json)
    )


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or of one of its checkpoints.")],
    strategy: Annotated[
        str | None, typer.Option("--strategy", "-s", help="How to spread the model over ranks (default: serial).")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    job: Annotated[str | None, typer.Option(help="The job's file, if it was moved since the run.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compute the validation metrics of a trained model."""
    from shoal.cli.evaluate import evaluate_command

    sys.exit(evaluate_command(run, strategy_text=strategy, step=step, job=job, as_json=as_json))
