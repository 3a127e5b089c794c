"""What every benchmark shares: ratios with their interval from interleaved rounds, a table, and `--json`."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any


def ratio(times: Sequence[float], over: Sequence[float]) -> tuple[float, float, float]:
    """Speed of `times` as a fraction of that of `over`: median of paired rounds and its 95% interval (bootstrap)."""
    pairs = [b / a for a, b in zip(times, over, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), medians[49], medians[1949]


def add_ratio(row: dict[str, Any], field: str, times: Sequence[float], over: Sequence[float]) -> None:
    middle, low, high = ratio(times, over)
    row |= {field: round(middle, 4), f"{field}_low": round(low, 4), f"{field}_high": round(high, 4)}


def arguments(description: str, extend: Callable[[argparse.ArgumentParser], None] = lambda parser: None) -> Any:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    extend(parser)
    return parser.parse_args()


def report(rows: list[dict[str, Any]], *, title: str, as_json: bool, notes: Sequence[str] = ()) -> None:
    if as_json:
        print(json.dumps({"rows": rows, "notes": list(notes)}))
        return
    from rich.console import Console
    from rich.table import Table

    # Into a file, lines may be as long as they are.
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=title)
    hidden = [f"{kind}_{end}" for kind in ("of_limit", "of_peer") for end in ("low", "high")]
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in hidden]
    for column in columns:
        words = column in ("name", "peer")
        table.add_column(column.replace("_", " "), justify="left" if words else "right", no_wrap=column == "name")
    for row in rows:
        cells = []
        for column in columns:
            value = row.get(column)
            text = "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
            if f"{column}_low" in row:
                text += f" [{row[f'{column}_low']:.3f}, {row[f'{column}_high']:.3f}]"
            cells.append(text)
        table.add_row(*cells)
    console.print(table)
    for note in notes:
        console.print(note, style="dim")
