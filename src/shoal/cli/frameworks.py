"""`shoal compare --frameworks`: the adapters, and which of them run on this machine."""

from __future__ import annotations

from shoal.api.frameworks import frameworks
from shoal.cli.output import print_json


def frameworks_command(*, as_json: bool) -> int:
    rows = frameworks()
    if as_json:
        print_json({"frameworks": rows})
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("name", "framework", "does the same as", "here"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row["name"], row["title"], row["same_as"], row["missing"] or "runs")
    Console(highlight=False).print(table)
    return 0
