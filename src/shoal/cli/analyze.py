"""`shoal analyze JOB`: work, depth and bytes of a network, layer by layer; how many devices each axis could use; how
fast p processors could be at best and at worst. A preset's shape is enough and needs no torch; a job is traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.api.analyze import analyze
from shoal.cli.output import emitter, short, write_picture

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 80
"""Of the table by layer. Networks with more show blocks only; `--json` has every layer."""


YIELDING = ("shape", "bytes", "kind", "best by depth", "by depth", "samples", "fft", "grad x", "grad w")
"""Columns that yield to a narrow terminal, in this order: a figure that is cut off would be a wrong one."""

FOLDED = ("kind", "shape", "because")
"""Columns that may take several lines where the terminal is narrow."""
FOLDED_WIDE = 14
"""What they keep at least."""


def analyze_command(
    text: str, *, batch: int | None, as_json: bool, picture_file: str | None, measure: bool = False
) -> None:
    """Prints the analysis of a preset or a job, and draws it where a file is named."""
    from rich.console import Console

    with emitter(_print, as_json=as_json) as show:
        with Console(stderr=True).status("") as status:
            found = analyze(text, batch=batch, measure=measure, progress=status.update)
        report = found.to_json()
        if picture_file is not None:
            write_picture(found.to_svg(), picture_file, option="--picture")
            report["picture"] = {"file": picture_file}
        show(report)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    room = console.width - 2
    title = f"  {short(report['parameters'])} parameters, batch {report['batch']:,}"
    console.print(Text.assemble((report["network"], "bold cyan"), title), soft_wrap=True)
    for heading, table in (
        ("Layers", _layers(report, room=room)),
        ("Totals", _totals(report)),
        ("Concurrency", _axes(report)),
        ("Time on p processors, in operations: max(W/p, D) <= T <= W/p + D", _bounds(report)),
        (
            "Convolutions: work (in real multiply-adds) and depth of each algorithm, in forward",
            _convolutions(report, room=room),
        ),
        ("Convolutions, timed here: milliseconds of a forward and backward", _measured(report, room=room)),
    ):
        if table.row_count:
            console.print()
            console.print(Text(heading, style="bold"), soft_wrap=True)
            console.print(Padding(table, (0, 0, 0, 2), expand=False))
    lines = [
        f"{name}: no formula for it; counted by its shapes, {times} times" for name, times in report["unknown"].items()
    ]
    if lines:
        console.print()
        console.print(Text("Unknown operators", style="bold red"))
    for line in (*lines, *report["notes"]):
        console.print(Padding(Text(line, style="red" if line in lines else ""), (0, 0, 0, 2), expand=False))
    console.print()
    console.print(Padding(Text(f"Unit: {report['unit']}.", style="dim"), (0, 0, 0, 2), expand=False))
    if "picture" in report:
        console.print(f"\nPicture  drawn in {report['picture']['file']}", markup=False, soft_wrap=True)


def _table(*columns: str, words: tuple[str, ...]) -> Table:
    """Columns of figures stand at the right, those of words at the left; what is long is folded."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        plain = name in words
        table.add_column(name, justify="left" if plain else "right", overflow="fold", no_wrap=name not in FOLDED)
    return table


class Fitted:
    """A table that gives up columns until the others have room."""

    def __init__(self, *columns: str, words: tuple[str, ...]) -> None:
        self.columns, self.words = columns, words
        self.rows: list[tuple[tuple[str, ...], str | None]] = []

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """One row, as rich takes it."""
        self.rows.append((cells, style))

    def table(self, *, room: int) -> Table:
        """With as many columns as there is room for."""
        wide = {
            name: max(len(cells[place]) for cells in (self.columns, *(cells for cells, _ in self.rows)))
            for place, name in enumerate(self.columns)
        }
        wide |= {name: min(wide[name], FOLDED_WIDE) for name in FOLDED if name in wide}
        for name in YIELDING:
            if sum(wide.values()) + 2 * len(wide) <= room:
                break
            wide.pop(name, None)
        table = _table(*wide, words=self.words)
        for cells, style in self.rows:
            kept = (cell for name, cell in zip(self.columns, cells, strict=True) if name in wide)
            table.add_row(*kept, style=style)
        return table


def _layers(report: dict[str, Any], *, room: int) -> Table:
    groups = report["groups"]
    rows = sum(1 + len(group["layers"]) * (len(group["layers"]) > 1) for group in groups)
    words = ("layer", "kind", "shape")
    table = Fitted(*words, "parameters", "work, depth", "grad x", "grad w", "bytes", words=words)
    for group in groups:
        single, several = len(group["layers"]) == 1, group["count"] > 1
        name = _span(group)
        if single:
            _add_layer(table, group["layers"][0], f"{name}, {group['count']} alike" if several else name)
            continue
        table.add_row(
            f"{name}: {group['count']} alike, each" if several else name,
            "",
            "",
            short(group["parameters"]),
            _cost(group["forward"]),
            "",
            "",
            short(group["forward"]["bytes"]),
            style="bold",
        )
        if rows <= MOST_ROWS:
            for layer in group["layers"]:
                _add_layer(table, layer, f"  {_within(layer['name'], group['first'])}")
    return table.table(room=room)


def _add_layer(table: Fitted, layer: dict[str, Any], name: str) -> None:
    passes = (layer["forward"], layer["input_gradient"], layer["weight_gradient"])
    table.add_row(
        name,
        layer["kind"],
        layer["shape"],
        short(layer["parameters"]) if layer["parameters"] else "",
        *(_cost(cost) for cost in passes),
        short(layer["forward"]["bytes"]),
        style="red" if layer["unknown"] else None,
    )


def _cost(cost: dict[str, int]) -> str:
    """Work and depth, or a stroke for a pass that there is not."""
    return f"{short(cost['work'])}, {cost['depth']}" if cost["bytes"] else "-"


def _totals(report: dict[str, Any]) -> Table:
    table = _table("", "work W", "depth D", "W/D", "bytes", "operations a byte", words=("",))
    for name, cost in report["totals"].items():
        table.add_row(
            name,
            short(cost["work"]),
            f"{cost['depth']:,}",
            short(cost["parallelism"]),
            short(cost["bytes"]),
            f"{cost['intensity']:.1f}",
        )
    return table


def _axes(report: dict[str, Any]) -> Table:
    table = _table("axis", "", "up to", "of the work", "because", words=("axis", "", "because"))
    for axis in report["concurrency"]:
        share = f"{100 * axis['work_share']:.1f}%" if axis["degree"] > 1 else "-"
        table.add_row(axis["axis"], axis["title"], f"{axis['degree']:,}", share, axis["words"])
    return table


def _bounds(report: dict[str, Any]) -> Table:
    table = _table("p", "at least", "at most", "speed-up", words=())
    for row in report["bounds"]:
        if str(row["processors"]).startswith("1"):
            slow, fast = row["speedup"]
            table.add_row(
                f"{row['processors']:,}",
                short(row["least"]),
                short(row["most"]),
                f"{slow:,.1f} to {fast:,.1f}",
            )
    return table


def _convolutions(report: dict[str, Any], *, room: int) -> Table:
    """Winograd's column is that of the tile with the least work."""
    words = ("layers", "shape", "best by work", "best by depth")
    table = Fitted(*words[:2], "direct, im2col", "fft", "winograd", *words[2:], words=words)
    for row in report["convolutions"]:
        found = row["algorithms"]
        winograd = [cost for name, cost in found.items() if name.startswith("winograd")]
        cells = [found["direct"], found["fft"], min(winograd, key=lambda cost: cost["real_work"]) if winograd else None]
        more = f" and {len(row['layers']) - 1} more" if len(row["layers"]) > 1 else ""
        table.add_row(
            row["layers"][0] + more,
            row["shape"],
            *(f"{short(cost['real_work'])}, {cost['depth']}" if cost else "-" for cost in cells),
            row["best_by_work"],
            row["best_by_depth"],
        )
    return table.table(room=room)


def _measured(report: dict[str, Any], *, room: int) -> Table:
    words = ("layers", "shape", "best by work", "by depth", "by time")
    methods = ("library", "direct", "im2col", "fft", "winograd")
    table = Fitted(*words[:2], "samples", *methods, *words[2:], words=words)
    for row in report.get("measured", []):
        more = f" and {len(row['layers']) - 1} more" if len(row["layers"]) > 1 else ""
        table.add_row(
            row["layers"][0] + more,
            row["shape"],
            str(row["samples"]),
            *(f"{1000 * row['seconds'][name]:.3g}" if name in row["seconds"] else "-" for name in methods),
            row["best_by_work"],
            row["best_by_depth"],
            row["best_by_time"],
        )
    return table.table(room=room)


def _span(group: dict[str, Any]) -> str:
    first, last = group["first"], group["last"]
    return first if first == last else f"{first} .. {last.rpartition('.')[2]}"


def _within(name: str, block: str) -> str:
    """A layer's name without that of its block."""
    return name.removeprefix(f"{block}.") if name != block else name.rpartition(".")[2]
