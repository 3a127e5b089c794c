"""The mesh of ranks as a small picture in text: the last axis runs along a row, the one before it down the
rows.
"""

from __future__ import annotations

from shoal.strategy.expression import Axis, Strategy

MOST_COLUMNS = 8
MOST_ROWS = 8


def mesh_picture(strategy: Strategy) -> tuple[str, ...]:
    """Lines that show which rank stands where; large meshes show their first corner."""
    axes = [axis for axis in strategy.axes if axis.size > 1]
    if not axes:
        return ("rank 0", *_servers(strategy))
    columns = axes[-1]
    rows = axes[:-1]
    width = len(str(strategy.workers - 1))
    shown_columns = min(columns.size, MOST_COLUMNS)
    cut = columns.size > shown_columns
    labels, starts, total = _rows(rows, columns.size)
    label_width = max((len(label) for label in labels), default=0)
    lines = [f"{'':{label_width}}   {columns.name} ->"]
    for label, start in zip(labels, starts, strict=True):
        ranks = "  ".join(f"{start + column:>{width}}" for column in range(shown_columns))
        lines.append(f"{label:{label_width}}   {ranks}{'  ...' if cut else ''}")
    if total > len(labels):
        lines.append(f"{'...':{label_width}}   ({total - len(labels):,} more rows)")
    return (*lines, *_servers(strategy))


def _rows(axes: list[Axis], stride: int) -> tuple[list[str], list[int], int]:
    """Labels such as "dp 0, pp 1" and the first rank of each row that is shown."""
    total = 1
    for axis in axes:
        total *= axis.size
    labels, starts = [], []
    for row in range(min(total, MOST_ROWS)):
        rest, parts = row, []
        for axis in reversed(axes):
            rest, at = divmod(rest, axis.size)
            parts.append(f"{axis.name} {at}")
        labels.append(", ".join(reversed(parts)))
        starts.append(row * stride)
    return labels, starts, total


def _servers(strategy: Strategy) -> tuple[str, ...]:
    if not strategy.servers:
        return ()
    first, last = strategy.workers, strategy.world - 1
    return (f"servers: rank {first}" if first == last else f"servers: ranks {first} to {last}",)
