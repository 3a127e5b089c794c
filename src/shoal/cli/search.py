"""`shoal search`: a live table of trials on a terminal, lines for a log, the best at the end."""

from __future__ import annotations

import sys
from typing import Any

from shoal.api.search import Search, search, words
from shoal.cli.output import emitter

SHOWN = 12
"""Trials in the live table: those that run, and the best."""


def search_command(space: str, *, as_json: bool, **options: Any) -> int:
    """Searches, prints, and returns the exit status."""
    show = LiveTrials() if sys.stderr.isatty() and not as_json else TrialLines()
    with emitter(_print, as_json=as_json) as emit:
        try:
            found = search(space, progress=show.message, **options)
        finally:
            show.close()
        emit(found.to_json() if as_json else found)
    return 0


def _print(found: Search) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    options, best = found.results["options"], found.best
    rows = {
        "trials": f"{sum(row['state'] == 'finished' for row in found.trials)} finished of {len(found.trials)}, by "
        f"{options['method']}",
        f"best {options['metric']}": f"{best['value']:.6g}  (trial {best['trial']})",
        "values": words(best["params"]),
    }
    if found.results["importances"]:
        shares = list(found.results["importances"].items())[:4]
        rows["what mattered"] = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    winner = found.results.get("winner")
    if winner is not None:
        rows["retrained"] = f"{options['metric']} {winner['value']:.6g}, in {winner['folder']}"
        rows["its weights"] = winner["weights"]
    rows["its job"] = best["job"]
    rows["page"] = str(found.page)
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        console.print(Text.assemble((name.ljust(width), "dim"), value), soft_wrap=True)
    if found.front:
        _print_front(found, console)


def _print_front(found: Search, console: Any) -> None:
    """The models of which none is beaten in quality, time and memory, the fastest first."""
    from rich.table import Table

    options = found.results["options"]
    table = Table(
        title=f"front, predicted for {options['cluster']}",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for name in ("trial", options["metric"], "step", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("values")
    for row in found.front:
        known = row["predicted"]
        table.add_row(
            str(row["trial"]),
            f"{row['value']:.4g}",
            f"{1000 * known['step_s']:.3g} ms",
            f"{known['memory_bytes'] / 1e6:.3g} MB",
            words(row["params"]),
        )
    console.print(table)


def _ended(message: dict[str, Any]) -> str:
    row = next(row for row in message["results"]["trials"] if row["number"] == message["trial"])
    done = sum(each["state"] in ("finished", "ended early", "failed") for each in message["results"]["trials"])
    value = row["state"] if row["value"] is None else f"{row['value']:.5g}"
    why = f" ({row['reason']})" if row["reason"] else ""
    return f"trial {row['trial']} ({done} ended): {value}{why}  {words(row['params'])}"


class TrialLines:
    """Progress for a log: a line for each trial."""

    def message(self, message: dict[str, Any]) -> None:
        """Takes what a search reports."""
        text = _ended(message) if message["event"] == "end" else message.get("text")
        if text and not message.get("winner"):
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class LiveTrials:
    """Progress on a terminal: the trials that run and the best so far, in a table that stays in its place."""

    def __init__(self) -> None:
        from rich.live import Live

        self.live = Live(refresh_per_second=8, transient=True)
        self.results: dict[str, Any] | None = None
        self.steps: dict[int, tuple[int, int]] = {}
        self.winner: tuple[int, int] | None = None
        self.live.start()

    def message(self, message: dict[str, Any]) -> None:
        """Takes what a search reports."""
        event = message["event"]
        if event == "step" and message.get("winner"):
            self.winner = message["step"], message["total"]
        elif event == "step":
            self.steps[message["trial"]] = message["step"], message["steps"]
        elif "text" in message:
            self.live.console.print(message["text"], style="dim", markup=False)
        self.results = message.get("results", self.results)
        if self.results is not None:
            self.live.update(self._table(self.results))

    def _table(self, results: dict[str, Any]) -> Any:
        from rich.table import Table

        trials, options = results["trials"], results["options"]
        done = [row for row in trials if row["state"] not in ("running", "queued")]
        total = options["trials"] * (options["rounds"] if options["method"] == "pbt" else 1)
        title = f"{len(done)} of {total}" + (
            f", retraining the best: step {self.winner[0]} of {self.winner[1]}" if self.winner else ""
        )
        style: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "header_style": "dim"}
        table = Table(title=title, title_justify="left", expand=True, **style)
        for name in ("trial", "", options["metric"]):
            table.add_column(name, no_wrap=True)
        table.add_column("values", no_wrap=True, overflow="ellipsis", ratio=1)  # What is left of the line.
        sign = -1.0 if options["better"] == "higher" else 1.0
        ranked = sorted((row for row in done if row["value"] is not None), key=lambda row: sign * row["value"])
        running = [row for row in trials if row["state"] == "running"]
        for row in [*running, *ranked[: max(3, SHOWN - len(running))]]:
            state = row["state"]
            if state == "running" and row["number"] in self.steps:
                state = "step {}/{}".format(*self.steps[row["number"]])
            value = "" if row["value"] is None else f"{row['value']:.5g}"
            table.add_row(str(row["trial"]), state, value, words(row["params"]), style=None if value else "cyan")
        return table

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self.live.stop()
