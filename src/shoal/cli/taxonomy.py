"""`shoal taxonomy`: the techniques, and the field's systems placed by their terms, as a table, as JSON or as
Markdown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from shoal.api.taxonomy import taxonomy
from shoal.cli.output import print_json

if TYPE_CHECKING:
    from rich.console import Console

Format = Literal["table", "json", "markdown"]

TECHNIQUE_COLUMNS = {
    "name": "term",
    "family": "family",
    "title": "technique",
    "example": "example",
    "contract": "contract",
    "where": "made for",
}
DETAIL_COLUMNS = {
    "name": "term",
    "title": "technique",
    "detail": "sends, for n elements of s bytes",
    "example": "example",
}
SYSTEM_COLUMNS = {
    "name": "system",
    "year": "year",
    "strategy": "as a strategy",
    "parallelism": "parallelism",
    "optimisation": "optimisation",
    "scheduling": "scheduling",
    "communication": "communication",
    "spectrum": "spectrum",
    "comparison": "compared as",
    "contract": "contract",
}


def print_taxonomy(format: Format = "table", *, family: str | None = None) -> None:
    """Print both tables in the format asked for; of one family, its techniques alone."""
    tables = taxonomy(family)
    if format == "json":
        print_json(tables.to_json())
        return
    columns = TECHNIQUE_COLUMNS
    if family is not None and any(row["detail"] for row in tables.techniques):
        columns = DETAIL_COLUMNS
    shown = [(family or "Techniques", columns, tables.techniques)]
    if tables.systems is not None:
        shown.append(("Systems", SYSTEM_COLUMNS, tables.systems))
    if format == "markdown":
        for each in shown:
            print(_markdown(*each))
    elif format == "table":
        for each in shown:
            _print_table(*each)
    else:
        raise ValueError(f'format is {format!r}; expected "table", "json" or "markdown"')


def _markdown(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> str:
    def cell(value: object, code: bool) -> str:
        text = str(value).replace("|", "\\|")
        return f"`{text}`" if code else text

    code = {"strategy", "example"}
    lines = [f"## {title}", "", "| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row[key], key in code) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _print_table(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """A table where the terminal is wide enough, else an entry of two or three lines for each row."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"{title} ({len(rows)})"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name in columns.values():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(row[key])) for key in columns))
    console = Console(highlight=False)
    if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
        console.print(table)
    else:
        _print_entries(title, columns, rows, console)


def _print_entries(title: str, columns: dict[str, str], rows: list[dict[str, Any]], console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    first, expression = next(iter(columns)), "strategy" if "strategy" in columns else "example"
    rest = [key for key in columns if key not in (first, expression)]
    console.print(Text(f"{title}: {', '.join(columns[key] for key in rest)}", style="bold"))
    for row in rows:
        console.print(Text.assemble((f"  {row[first]}", "bold"), f"   {row[expression]}"))
        console.print(Padding(Text("; ".join(str(row[key]) for key in rest if row[key]), style="dim"), (0, 0, 0, 6)))
