"""`shoal compare`, `shoal report`, `shoal runs`: a bar while runs are made, a table at the end."""

from __future__ import annotations

import sys
import time
from typing import Any

from shoal.api.compare import CannotCompare, Comparison, Runs, compare, report, runs
from shoal.cli.output import emitter


def compare_command(jobs: list[str], *, ranks: str, as_json: bool, **options: Any) -> int:
    """Runs, prints, and returns the exit status: 1 where a contestant was unfair or failed."""
    show = _Bar() if sys.stderr.isatty() and not as_json else _Lines()
    try:
        numbers = [int(each) for each in ranks.split(",")]
    except ValueError:
        raise CannotCompare(f"--ranks {ranks}: expected numbers with commas between them, such as 1,2") from None
    with emitter(_print, as_json=as_json) as emit:
        try:
            found = compare(*jobs, ranks=numbers, progress=show.message, **options)
        finally:
            show.close()
        emit(found.to_json() if as_json else found)
    return 0


def report_command(folders: list[str], *, to: str | None, as_json: bool) -> int:
    with emitter(_print, as_json=as_json) as emit:
        found = report(*folders, to=to)
        emit(found.to_json() if as_json else found)
    return 0


def runs_command(folder: str, *, as_json: bool) -> int:
    with emitter(_print, as_json=as_json) as emit:
        found = runs(folder)
        emit(found.to_json() if as_json else found)
    return 0


def _print(found: Comparison | Runs) -> None:
    from rich.console import Console
    from rich.table import Table

    title, head, rows = found._table()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number < 2 or name == "verdict" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    if isinstance(found, Comparison):
        for job in found.results["jobs"]:
            for row in job["rows"]:
                for each in row["findings"]:
                    if each["kind"] != "departure":
                        console.print(f"  {row['name']}: {each['name']}: {each['text']}", markup=False)
                for reason in row["failed"]:
                    console.print(f"  {row['name']} failed: {reason}", markup=False)
            for each in job["absent"]:
                who = f"{each['name']} on {each['ranks']}"
                console.print(f"  {who} did not run: {each['why']}", markup=False, style="dim")
    console.print(title, markup=False)


class _Lines:
    """Progress for a log: a line for each run."""

    def message(self, message: dict[str, Any]) -> None:
        if "text" in message:
            print(message["text"], file=sys.stderr, flush=True)
        elif message.get("event") == "start":
            cell = message["cell"]
            where = f"{cell.job}  {cell.contestant}  on {cell.ranks}, seed {cell.seed}"
            print(f"run {message['done'] + 1} of {message['total']}: {where}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """Progress on a terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("runs, left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.task: Any = None
        self.started = time.monotonic()

    def message(self, message: dict[str, Any]) -> None:
        if "text" in message:
            self.progress.console.print(message["text"], style="dim", markup=False)
            return
        if self.task is None:
            self.task = self.progress.add_task("", total=message["total"])
            self.progress.start()
        cell, part = message["cell"], 0.0
        words = f"{cell.job}  {cell.contestant}  on {cell.ranks}, seed {cell.seed}"
        if message.get("event") == "step":
            part = message["step"] / message["steps"]
            words += f"  step {message['step']}/{message['steps']}"
        from rich.markup import escape

        self.progress.update(self.task, completed=message["done"] + part, description=escape(words))

    def close(self) -> None:
        self.progress.stop()
