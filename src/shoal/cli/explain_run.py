"""`shoal explain RUN [RUN]`: what held a run back, or why two differ."""

from __future__ import annotations

from shoal.api.explain_run import explain_run
from shoal.cli.output import print_json


def explain_run_command(first: str, second: str | None, *, as_json: bool) -> None:
    found = explain_run(first, second)
    if as_json:
        print_json(found.to_json())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title, head, rows = found._table()
    console = Console(highlight=False)
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, name in enumerate(head):
        last = number == len(head) - 1
        table.add_column(name, justify="left" if last else "right", overflow="fold", no_wrap=not last)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
