"""The command line: one subcommand a verb.

Nothing heavy is imported until a verb needs it, so help answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

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
JSON = typer.Option("--json", help="One JSON object on standard output.")


@app.command()
def explain(
    what: Annotated[
        str,
        typer.Argument(metavar="STRATEGY|JOB", help="A strategy, for example 'dp(8, zero=1) * tp(2)'; or a job."),
    ],
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
    how its model may be cut."""
    from shoal.cli.explain import explain_anything

    explain_anything(
        what, as_json=as_json, world=ranks, timeline=timeline, timeline_file=timeline_file, strategy_text=strategy,
        size=size, picture_file=picture,
    )  # fmt: skip


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
) -> None:
    """Count work, depth and bytes of a network, and how many devices each axis could use."""
    from shoal.cli.analyze import analyze_command

    analyze_command(job, batch=batch, as_json=as_json, picture_file=picture)


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
def train(
    job: Annotated[str, JOB],
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
    folder: Annotated[
        str | None, typer.Option(help="Where the run is recorded (default: a new folder in runs/).")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="A run's folder or a checkpoint to go on from, by default with its settings."),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between checkpoints; 0 writes none.")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Write a Chrome/Perfetto trace of some steps.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Run all steps even if the target is reached early.")
    ] = False,
    hang_after: Annotated[
        float, typer.Option(min=1.0, help="Seconds without progress after which a late rank is named.")
    ] = 300.0,
    backend: Annotated[
        str | None, typer.Option(help="shoal, gloo or the accelerator's, such as nccl (default: by the devices here).")
    ] = None,
    emulate: Annotated[
        str | None, typer.Option(help='Behave like a slower cluster: "4x2, 10us, 20GB/s | 100us, 1Gb/s".')
    ] = None,
    no_gate: Annotated[
        bool, typer.Option("--no-gate", help="Do not check a strategy by two steps in float64 before its first use.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Train a job under a strategy: live progress, a run folder, checkpoints."""
    from shoal.cli.train import train_command
    from shoal.training.options import TrainOptions

    options = TrainOptions(
        job=job, strategy=strategy, size=size, steps=steps, global_batch=batch, seed=seed, folder=folder, resume=resume,
        growth=grow_batch, scale_rule=scale_rule, base_batch=base_batch, warmup=warmup,
        checkpoint_every=checkpoint_every, trace=trace, stop_at_target=not full, backend=backend, gate=not no_gate,
        emulate=emulate,
    )  # fmt: skip
    sys.exit(train_command(options, ranks=ranks, hang_after_s=hang_after, as_json=as_json))


@app.command()
def verify(
    job: Annotated[str, JOB],
    strategy: Annotated[str, STRATEGY],
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps to compare.")] = 10,
    size: Annotated[str | None, SIZE] = None,
    batch: Annotated[int | None, BATCH] = None,
    seed: Annotated[int | None, SEED] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Prove that a strategy trains the same model as one process does, or report how far it differs."""
    from shoal.cli.verify import verify_command

    sys.exit(verify_command(job, strategy, steps=steps, size=size, batch=batch, seed=seed, as_json=as_json))


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
        str | None, typer.Option(help="Also plan islands that are averaged now and then, such as local(8).")
    ] = None,
    size: Annotated[str | None, SIZE] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a page that works offline.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Train the job by the best plan, on this machine.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Estimate every legal strategy of a model on a cluster, rank those that fit, and report what a change would do."""
    from shoal.cli.plan import plan_command

    sys.exit(
        plan_command(
            what, cluster_name=cluster, devices=devices, batch=batch, by=by, top=top, as_json=as_json, html_file=html,
            run=run, sequence=sequence, precision=precision, price=price, watts=watts, kwh_price=kwh_price, pilot=pilot,
            size=size, profile=profile, sync=sync,
        )
    )  # fmt: skip


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
    straggler: Annotated[list[str] | None, typer.Option(help="RANK:FACTOR, slow this rank down by FACTOR.")] = None,
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
            what, strategy_text=strategy, cluster_name=cluster, devices=devices, batch=batch, steps=steps,
            stragglers=straggler or (), links=link or (), noise=noise, seed=seed, mtbf_h=mtbf_hours,
            checkpoint_s=checkpoint_seconds, restart_s=restart_seconds, trace_file=perfetto, svg_file=svg,
            as_json=as_json,
        )
    )  # fmt: skip


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


def run() -> None:
    """The `shoal` command. Errors that a user can mend are shown as sentences, not as tracebacks."""
    try:
        _start_early(sys.argv[1:])
        # Typer turns an interrupt into a status, which it returns.
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        # stdout was closed (`| head`): discard what is still buffered.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(1)
    except Exception as error:
        sys.exit(_print_error(error))
    if status == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Everything is ending; another Ctrl-C must not change the status.
        print("stopped", file=sys.stderr)
    sys.exit(status or 0)


def _start_early(words: list[str]) -> None:
    """Ranks are forked off a process that takes a second to load; it loads while this one reads the command line."""
    if words[:1] in (["train"], ["verify"]) and "--help" not in words and "RANK" not in os.environ:
        from shoal.launch import warm_up

        warm_up()


def _print_error(error: Exception) -> int:
    """Prints the error; the exit status: 2 for what a user can mend, 1 for a rank that failed."""
    shown = getattr(error, "format_message", None)
    if shown is not None or isinstance(error, (ValueError, FileNotFoundError)):
        # All ranks of a launcher raise the same error: print it once per host.
        if "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"shoal: {shown() if shown is not None else error}", file=sys.stderr)
        return 2
    if type(error).__module__ == "shoal.launch.failure":
        # One rank's failure ends all; its own traceback is the one that helps.
        if not error.for_user and error.traceback_text:  # type: ignore[attr-defined]
            print(error.traceback_text, file=sys.stderr)  # type: ignore[attr-defined]
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    raise error


if __name__ == "__main__":
    run()
