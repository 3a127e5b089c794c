"""`shoal calibrate`: measures links, collectives and operators on ranks of this host, shows them, writes the file.

Started by torchrun on several hosts it becomes one rank of the measurement instead, and rank 0 writes. Elsewhere this
process imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from shoal.api.calibrate import calibrate, is_launched
from shoal.cli.output import emitter

if TYPE_CHECKING:
    from shoal.calibration.findings import Findings

COLLECTIVES = "collectives and links"
NOT_WRITTEN = "shoal: nothing was written; calibrate when the machine is idle, or write these figures with --force"


def calibrate_command(*, as_json: bool, **options: Any) -> int:
    """Measures, prints, and returns the exit status."""
    launched, status = is_launched(), 0
    quiet = launched and os.environ["RANK"] != "0"
    with emitter(show, as_json=as_json) as emit:
        with contextlib.nullcontext(lambda message: None) if quiet else _progress() as moved:
            found = calibrate(on_message=moved, **options)
        if found is not None:
            report: Any = found.to_json() if as_json else found.findings
            emit(report)
            print(f"written to {found.file}" if found.file else NOT_WRITTEN, file=sys.stderr)
            status = 0 if found.file else 1
    if launched:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Gloo's threads may hang or abort the interpreter's own way out; all is done by now.
        os._exit(status)
    return status


@contextlib.contextmanager
def _progress() -> Any:
    """A bar on a terminal, otherwise a line a round."""
    if not sys.stderr.isatty():
        last: dict[str, int] = {}

        def line(message: dict[str, Any]) -> None:
            what, percent = message.get("what", COLLECTIVES), 100 * message["done"] // message["of"]
            if percent >= last.get(what, 0) + 20 or percent == 100 > last.get(what, 0):
                last[what] = percent
                print(f"measuring {what}: {percent}%", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("measuring {task.description}"),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda message: bar.update(
            task, completed=message["done"], total=message["of"], description=message.get("what", COLLECTIVES)
        )


def show(findings: Findings) -> None:
    """The findings for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    backends = list(findings.relative_time)
    where = f"{findings.ranks} ranks" + (f" on {findings.hosts} hosts" if findings.hosts > 1 else "")
    table = Table(title=f"Collectives of {where}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("collective")
    ratios = [f"{other} / {findings.fastest}" for other in backends if other != findings.fastest]
    for column in ("size", *backends, *ratios):
        table.add_column(column, justify="right")
    before = None
    for row in sorted(findings.times, key=lambda row: row["collective"]):
        if before not in (None, row["collective"]):
            table.add_section()
        name = row["collective"].replace("_", "-") if row["collective"] != before else ""
        before, seconds = row["collective"], row["seconds"]
        others = [seconds[other] / seconds[findings.fastest] for other in backends if other != findings.fastest]
        cells = [*(in_words(seconds[each]) for each in backends), *(f"{ratio:.2f}" for ratio in others)]
        table.add_row(name, size(row["bytes"]), *cells)
    console.print(table)
    means = ", ".join(f"{name} {value:.2f}" for name, value in findings.relative_time.items())
    console.print(f"fastest backend: {findings.fastest} (relative time, geometric mean: {means})")
    for name, fit in findings.links.items():
        loopback = name == "between" and findings.hosts == 1
        title = {"inside": "inside a host", "between": "between hosts"}[name] + (" (TCP on loopback)" * loopback)
        console.print(
            f"{title}: {in_words(fit.link.latency_s)} a message, {_rate(fit.link.byte_s)}, "
            f"{_reducing(fit.link.reduce_byte_s)}; the model is {100 * fit.error:.0f}% off at the median",
            soft_wrap=True,
        )
        chosen = ", ".join(f"{algorithm} from {size(nbytes)}" for nbytes, algorithm in findings.choices(name))
        console.print(
            f"  all-reduce of {findings.link_ranks[name]} ranks: {chosen} "
            f"({findings.over_best[name]:.2f} of the best algorithms' time)",
            soft_wrap=True,
        )
    if findings.machine is not None:
        _show_machine(console, findings)
    for warning in findings.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)


SHOWN_PRODUCTS = (64, 128, 256, 512, 1024)


def _show_machine(console: Any, findings: Findings) -> None:
    machine = findings.machine
    assert machine is not None
    linear = machine.products["linear"][0]
    rates = (f"{side}: {2e-9 * side**3 / linear.seconds(1, side, side, side):.0f}" for side in SHOWN_PRODUCTS)
    console.print(f"matrix products of each rank, GFLOP/s by the side of a square: {', '.join(rates)}", soft_wrap=True)
    errors = ", ".join(f"{kind} {100 * error:.0f}%" for kind, error in findings.machine_errors.items())
    console.print(f"  the model is off at the median: {errors}", soft_wrap=True)
    console.print(f"memory of each rank: {machine.memory_bytes_per_s / 1e9:.1f} GB/s, read and written")
    over = {name: in_words(seconds) for name, seconds in machine.overheads.items()}
    console.print(
        f"the engine adds {over['step_s']} a step, {over['pass_s']} a micro-batch, {over['action_s']} a stage's pass",
        soft_wrap=True,
    )


def in_words(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def _rate(byte_s: float) -> str:
    return f"{1e-9 / byte_s:.1f} GB/s" if byte_s < 1e-9 else f"{1e-6 / byte_s:.3g} MB/s"


def _reducing(byte_s: float) -> str:
    return f"reducing at {_rate(byte_s)} on top" if byte_s else "reducing included"
