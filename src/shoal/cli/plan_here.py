"""How a plan of a job on this machine is printed."""

from __future__ import annotations

from typing import Any

MOST_OVER_LINK = 8
"""Strategies over a link that are printed."""


def print_here(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shoal.planning.quantities import seconds

    console = Console(highlight=False)
    console.print(Text(report["title"], style="bold"))
    for heading, rows in (("", report["plans"]), ("Best of each family", report["families"])):
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in ("", "step", "memory", "of the step"):
            table.add_column(name, justify="left" if name in ("", "of the step") else "right", no_wrap=True)
        table.add_column("strategy", overflow="fold")
        for number, row in enumerate(rows, start=1):
            label = row["family"] if heading else str(number)
            table.add_row(
                label, seconds(row["step_s"]), f"{row['memory_bytes'] / 1e6:,.0f} MB", row["why"], row["strategy"]
            )
        console.print()
        if heading:
            console.print(Text(heading, style="bold"))
        console.print(table)
    if report["over_link"]:
        first, dense = report["over_link"][0], next(row for row in report["over_link"] if row["strategy"] == "dp(2)")
        console.print()
        console.print(Text(f"On two hosts, one rank each, over {report['link']}", style="bold"))
        for row in report["over_link"][:MOST_OVER_LINK]:
            sooner = dense["step_s"] / (row["step_s"] * row["slowdown"])
            words = f"{seconds(row['step_s'])} a step, {row['slowdown']:.3g} times the steps"
            console.print(
                Text(f"  {row['strategy']}: {words}; to the target {sooner:.3g} times as fast as dp(2)"), soft_wrap=True
            )
        console.print(Text(f"  So: {first['strategy']}"))
    if report["crossings_bytes_per_s"]:
        below = ", ".join(f"{name} {8e-9 * rate:.2g}" for name, rate in report["crossings_bytes_per_s"].items())
        console.print()
        console.print(Text("On two hosts, one rank each", style="bold"))
        console.print(Text(f"  Compression pays off below this inter-host bandwidth (Gb/s): {below}"), soft_wrap=True)
