"""`shoal plan`: which strategy to train a model by on a cluster. `--run` trains by the best."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from shoal.api.plan import CannotPlan, PlanReport, on_this_machine, plan
from shoal.cli.output import emitter, print_json, write_file
from shoal.planning.quantities import amount, gigabytes


def plan_command(
    what: str, *, as_json: bool, html_file: str | None, run: bool, size: str | None = None, **options: Any
) -> int:
    """Plans, prints, and if asked trains."""
    if html_file is not None and on_this_machine(what, options["cluster"]):
        raise CannotPlan(f"--html {html_file}: a plan for this machine has no page; leave it out, or use --json")
    with emitter(_show, as_json=as_json and not run) as emit:
        found = plan(what, size=size, to_run=run, **options)
        if html_file is not None:
            write_file(found.to_html(), html_file, option="--html")
        if not run and as_json and not found.here:
            pass  # Printed below, for people who read JSON.
        elif not (as_json and run):
            emit(found.to_json() if as_json else found)
    if as_json and not run and not found.here:
        print_json(found.to_json())
    if html_file is not None and not as_json:
        print(f"\nPage  written to {html_file}")
    if not run:
        return 0
    if found.best_to_run is None:
        raise CannotPlan(f"--run: {found.cannot_run}; none of the best plans can be trained")
    batch = options.get("batch") if found.here else found.global_batch
    return train_by(found.best_to_run, what, size=size, batch=None if batch is None else int(batch), as_json=as_json)


def _show(found: PlanReport) -> None:
    if found.here:
        from shoal.cli.plan_here import print_here

        print_here(found.report)
    else:
        _print(found.report)


def train_by(strategy: Any, what: str, *, size: str | None, batch: int | None, as_json: bool) -> int:
    """The same call as `shoal train`."""
    from shoal.api.train import TrainOptions
    from shoal.cli.train import train_command

    gc.enable()
    if not as_json:
        print(f"\nTraining by {strategy}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if strategy.world > cores:
        print(f"{strategy.world} ranks share {cores} cores here: steps will take longer than planned", file=sys.stderr)
    options = TrainOptions(job=what, strategy=str(strategy), size=size, global_batch=batch)
    return train_command(options, as_json=as_json)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(report["title"], style="bold"))
    for line in report["assumptions"]:
        console.print(Text(f"  {line}", style="dim"))
    for line in report["warnings"]:
        console.print(Text(f"Warning: {line}", style="yellow"))
    shown = (
        ("", report["plans"]),
        ("Best of each family", report["families"]),
        ("Pareto: time against memory", report["pareto"]),
    )
    for heading, rows in shown:
        console.print()
        if heading:
            console.print(Text(heading, style="bold"))
        for line, style in _lines(rows, errors=report["errors"], width=console.width):
            console.print(Text(line, style=style), soft_wrap=True)
    if report["link"]:
        console.print()
        console.print(Text("Which period and which compression for the link", style="bold"))
        for line in report["link"]:
            console.print(Text(f"  {line}"), soft_wrap=True)
    if report["servers"]:
        console.print()
        console.print(Text("Replicas that do not wait", style="bold"))
        for line in report["servers"]:
            console.print(Text(f"  {line}"), soft_wrap=True)
    beyond = report["plans"][0]["unmeasured"]
    if beyond:
        console.print()
        console.print(Text(f"Warning: the best plan uses features with little validation data: {', '.join(beyond)}."))
    console.print()
    console.print(Text("What if", style="bold"))
    for change in report["changes"]:
        console.print(Text(f"  {change['what']}: {change['outcome']}"), soft_wrap=True)


def _lines(rows: list[dict[str, Any]], *, errors: dict[str, Any], width: int) -> list[tuple[str, str]]:
    """(line, style) of a table. Strategies stand in its last column, or under their figures if that is too wide."""
    money = any(row.get("cost_in") == "money" for row in rows)
    energy = any(row.get("energy") for row in rows)
    heads = [
        "",
        f"step ±{errors['step']:.0%}",
        "a device",
        "MFU",
        "to target",
        *(["cost"] if money else []),
        *(["energy"] if energy else []),
        f"memory ±{errors['memory']:.0%}",
        "of it",
    ]
    cells = []
    for number, row in enumerate(rows, start=1):
        label = row.get("family") or str(number)
        if row["fits"]:
            priced = [*([amount(row)] if money else []), *([row["energy"]] if energy else [])]
            figures = [row["step"], row["speed"], row["mfu_text"], row["time"]]
            cells.append([label, *figures, *priced, row["memory"], row["why"]])
        else:
            blank = [""] * (len(heads) - 4)
            cells.append([label, "", *blank, row["memory"], f"misses by {gigabytes(-row['margin_bytes'])}"])
    wide = [max(len(line[place]) for line in [heads, *cells]) for place in range(len(heads))]

    def joined(line: list[str]) -> str:
        first = line[0].ljust(wide[0])
        return "  ".join([first, *(each.rjust(room) for each, room in zip(line[1:], wide[1:], strict=True))])

    one_line = all(len(joined(line)) + 2 + len(row["strategy"]) <= width for line, row in zip(cells, rows, strict=True))
    lines = [(joined(heads) + ("  strategy" if one_line else ""), "dim")]
    for line, row in zip(cells, rows, strict=True):
        style = "" if row["fits"] else "dim"
        if one_line:
            lines.append((f"{joined(line)}  {row['strategy']}", style))
        else:
            lines += [(joined(line), style), (f"    {row['strategy']}", style or "cyan")]
    return lines
