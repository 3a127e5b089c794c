"""Results that print as tables."""

from __future__ import annotations

from collections.abc import Sequence


class PrintedTable:
    """A result that prints as a title and a table, in a terminal and in a notebook."""

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """(title, heads, rows)"""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, heads, rows = self._table()
        lines = [list(heads), *(list(row) for row in rows)]
        wide = [max(len(line[place]) for line in lines) for place in range(len(heads))]
        return "\n".join(
            [
                title,
                *(
                    "  " + "  ".join(cell.ljust(room) for cell, room in zip(line, wide, strict=True)).rstrip()
                    for line in lines
                ),
            ]
        )

    def _repr_html_(self) -> str:
        from shoal.common.pages import rendered

        title, heads, rows = self._table()
        return rendered("table.html.j2", title=title, heads=heads, rows=rows)
