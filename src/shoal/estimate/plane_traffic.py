"""What ranks of spatial send for one event of a forward, as formulas.

    halo, gather   forward   a message to each rank that needs what this one holds: rows of its part
                   backward  the gradients of what it had borrowed, one message to each owner
    sum            all-reduce of the result, and of its gradient
    group norm     all-gather of mean, squares and count of each row of statistics; all-reduce of two sums

A recomputed forward sends the first of each pair a second time, in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shoal.estimate.traffic import Call, Group
from shoal.layout.spatial.grid import Grid
from shoal.layout.spatial.plan import PlaneEvent


def plane_calls(
    event: PlaneEvent, group: Group, sizes: tuple[int, int], index: int, *, again: bool = False
) -> Iterator[Call]:
    """The collectives and messages of a rank."""
    phases = ("forward", "backward") if again else ("forward",)
    if event.kind == "sum":
        size = prod(event.shape) * event.itemsize
        for phase in (*phases, *(["backward"] if event.learns else [])):
            yield group.axis, phase, "all_reduce", size, group.ranks
        return
    if event.kind == "norm":
        for phase in phases:
            yield group.axis, phase, "all_gather", group.ranks * (2 * event.shape[0] + 1) * event.itemsize, group.ranks
        if event.learns:
            yield group.axis, "backward", "all_reduce", 2 * event.shape[0] * event.itemsize, group.ranks
        return
    grid, move = Grid(sizes), event.move
    assert move is not None
    kept = tuple(part if need is None else None for part, need in zip(move.part, move.needs, strict=True))
    shape = grid.local_shape(event.shape, (kept[0], kept[1]), grid.place(index))
    for sent, received in move.bytes(grid, index, shape, event.itemsize):
        for phase in phases:
            yield from _messages(group, phase, sent, received)
        if event.learns:
            yield from _messages(group, "backward", received, sent)


def _messages(group: Group, phase: str, sent: int, received: int) -> Iterator[Call]:
    if sent:
        yield group.axis, phase, "send", sent, group.ranks
    if received:
        yield group.axis, phase, "recv", received, group.ranks
