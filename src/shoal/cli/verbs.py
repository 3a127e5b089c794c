"""Verbs that describe and plan, with their options: no rank is started.

Nothing heavy is imported until a verb needs it, so help answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.app import JSON, SIZE, STRAGGLER, STRATEGY, app


@app.command()
def explain(
    what: Annotated[
        str,
        typer.Argument(metavar="STRATEGY|JOB|RUN", help="A strategy, as 'dp(8, zero=1) * tp(2)'; a job; a run."),
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A second run: what it takes longer for than the first.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", "-s", help="With a job: check whether it can be trained with this.")
    ] = None,
    size: Annotated[str | None, SIZE] = None,
    as_json: Annotated[bool, JSON] = False,
    ranks: Annotated[int | None, typer.Option(help="Check it against this many ranks.")] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw what each rank of its pipeline does when, here and as SVG.")
    ] = False,
    timeline_file: Annotated[
        str | None, typer.Option(help="Where the SVG goes (default: timeline.svg); implies --timeline.")
    ] = None,
    picture: Annotated[
        str | None, typer.Option(help="Draw what each rank holds of batch, matrices, sequence and experts, as SVG.")
    ] = None,
) -> None:
    """Describe a strategy: its terms in words, mesh, contract, taxonomy, and systems that train this way. Of a job:
    how its model may be cut. Of a run: what held it back."""
    from shoal.api.explain import names_a_run

    if other is not None or names_a_run(what):
        from shoal.cli.explain_run import explain_run_command

        explain_run_command(what, other, as_json=as_json)
        return
    from shoal.cli.explain import explain_anything

    explain_anything(
        what,
        as_json=as_json,
        world=ranks,
        timeline=timeline,
        timeline_file=timeline_file,
        strategy_text=strategy,
        size=size,
        picture_file=picture,
    )


@app.command()
def analyze(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB|PRESET",
            help="A Python file that defines `job`, a built-in task, or a known shape: vgg16, resnet50, gpt:175b, ...",
        ),
    ],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in a step (default: the job's; of a preset 32 images or 1 text).")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    picture: Annotated[str | None, typer.Option(help="Draw the time bounds and the work by layer, as SVG.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also time each 2-D convolution here by every method.")
    ] = False,
) -> None:
    """Count work, depth and bytes of a network, and how many devices each axis could use."""
    from shoal.cli.analyze import analyze_command

    analyze_command(job, batch=batch, as_json=as_json, picture_file=picture, measure=measure)


@app.command()
def tokenize(
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="Text files, or .jsonl files with a document a line.")
    ],
    to: Annotated[str, typer.Option(metavar="FOLDER", help="The folder of tokens to write.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, a tokenizer.json of Hugging Face, or a folder that has one.")
    ] = "bytes",
    field: Annotated[str, typer.Option(help="Entry of a .jsonl line that holds its text.")] = "text",
    separator: Annotated[
        str | None, typer.Option(help="Token that ends each document (default: the tokenizer's own end of text).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder of tokens.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Tokenize text files once, for training on a memory-mapped file."""
    from shoal.cli.tokenize import tokenize_command

    tokenize_command(
        texts, as_json=as_json, to=to, tokenizer=tokenizer, field=field, separator=separator, overwrite=overwrite
    )


@app.command()
def validate(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.csv", help="Measured steps: model, cluster, strategy, seconds (docs/validation.md)."
        ),
    ],
    predictions: Annotated[
        str | None, typer.Option(metavar="OUT.csv", help="Write id,step_s,memory_gib,fits of each row.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Predict published measurements with the cost model, and report its errors, by source."""
    from shoal.cli.validate import validate_file

    validate_file(file, predictions_file=predictions, as_json=as_json)


@app.command()
def taxonomy(
    family: Annotated[
        str | None, typer.Argument(help="Only techniques of a family: axis, modifier, sync, via or compress.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables.")] = False,
) -> None:
    """List the techniques, and the field's systems, each written as a strategy and placed by its terms."""
    from shoal.cli.taxonomy import print_taxonomy

    print_taxonomy("json" if as_json else "markdown" if markdown else "table", family=family)


@app.command()
def plan(
    what: Annotated[str, typer.Argument(metavar="SHAPE|JOB", help="A preset shape such as gpt:175b, or a job.")],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A preset such as dgx-a100, a TOML file, or `this` machine.")
    ] = "this",
    devices: Annotated[
        int | None, typer.Option("--devices", "-n", min=1, help="Devices (default: all of them).")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Global batch: sequences (1536) or tokens (4M-tokens); default by noise scale.")
    ] = None,
    by: Annotated[str, typer.Option(help="Rank by time (to target), step, or cost.")] = "time",
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 10,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sequence, instead of the shape's own.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32 (default: what the device has).")] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price of one device for an hour.")] = None,
    watts: Annotated[
        float | None, typer.Option(help="Power of a device, for energy (default: its datasheet's).")
    ] = None,
    kwh_price: Annotated[float | None, typer.Option(min=0.0, help="Price of a kilowatt-hour.")] = None,
    pilot: Annotated[
        str | None, typer.Option(help="CSV of pilot runs (batch,steps[,compress]) for the steps to target.")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Framework profile: name or TOML file (default: good).")] = None,
    sync: Annotated[
        str | None,
        typer.Option(help="Also plan islands: local(8), auto for several periods; or no waiting: asp(), ssp(3)."),
    ] = None,
    straggler: Annotated[list[str] | None, STRAGGLER] = None,
    link: Annotated[
        str | None, typer.Option(help='A job on this machine: what to do over this link to another host, "50 Mb/s".')
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="sgd, adamw or muon: what staleness and local steps cost it (stated assumptions).")
    ] = "adamw",
    size: Annotated[str | None, SIZE] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page that works offline.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Train the job by the best plan, on this machine.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Estimate every legal strategy of a model on a cluster, rank those that fit, and report what a change would do."""
    from shoal.cli.plan import plan_command

    sys.exit(
        plan_command(
            what,
            cluster=cluster,
            devices=devices,
            batch=batch,
            by=by,
            top=top,
            as_json=as_json,
            html_file=html,
            run=run,
            sequence=sequence,
            precision=precision,
            price=price,
            watts=watts,
            kwh_price=kwh_price,
            pilot=pilot,
            size=size,
            profile=profile,
            sync=sync,
            optimizer=optimizer,
            link=link,
            straggler=straggler or (),
        )
    )


@app.command()
def simulate(
    what: Annotated[str, typer.Argument(metavar="SHAPE", help="A preset shape such as gpt:175b.")],
    strategy: Annotated[str, STRATEGY],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="A preset such as dgx-a100, or a TOML file.")],
    devices: Annotated[int | None, typer.Option("--devices", "-n", min=1, help="Devices (default: the ranks).")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Global batch, sequences or tokens (default: micro-batches of one).")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to simulate.")] = 1,
    straggler: Annotated[list[str] | None, STRAGGLER] = None,
    link: Annotated[list[str] | None, typer.Option(help="RANK:FRACTION, fraction of bandwidth its links keep.")] = None,
    noise: Annotated[float, typer.Option(min=0.0, help="Random slow-downs: a fraction of a step, such as 0.02.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random slow-downs.")] = 0,
    mtbf_hours: Annotated[float | None, typer.Option(help="Mean hours between failures of one device.")] = None,
    checkpoint_seconds: Annotated[float | None, typer.Option(help="Seconds to write one checkpoint.")] = None,
    restart_seconds: Annotated[float | None, typer.Option(help="Seconds from a failure until steps resume.")] = None,
    perfetto: Annotated[str | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    svg: Annotated[str | None, typer.Option(help="Write the timeline of the slowest replica.")] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Simulate a strategy on a cluster you do not have: idle ranks, the cost of stragglers, goodput under failures."""
    from shoal.cli.simulate import simulate_command

    sys.exit(
        simulate_command(
            what,
            strategy=strategy,
            cluster=cluster,
            devices=devices,
            batch=batch,
            steps=steps,
            straggler=straggler or (),
            link=link or (),
            noise=noise,
            seed=seed,
            mtbf_hours=mtbf_hours,
            checkpoint_seconds=checkpoint_seconds,
            restart_seconds=restart_seconds,
            trace_file=perfetto,
            svg_file=svg,
            as_json=as_json,
        )
    )
