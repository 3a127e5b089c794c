"""What tensor parallelism sends, in closed form.

For a region whose columns read a tensor of n bytes and whose rows write one of m bytes, both unsharded, on P ranks:

    between     forward                                 backward
    whole       all-reduce m                            all-reduce n
    sequence    all-gather n, reduce-scatter m          reduce-scatter n, all-gather m
    batch       as sequence, along the samples

A tensor that needs no gradient (the data) sends nothing back. Recomputed regions send forward's part again in
backward, except what recomputation does not reach: it stops at the last value that backward asks for, so the sum
that ends a block is not repeated unless something after it in the block (a norm, a dropout) keeps its input.

The vocabulary: the embedding all-reduces its result, the head all-reduces the gradient of its input, and the loss
on cut logits all-reduces a largest value for each row, then two sums (three with label smoothing).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.estimate.traffic import Call, Group
from shoal.layout.crossings import Crossing

SENDS: dict[str, tuple[str | None, str | None]] = {
    "copy_in": (None, "all_reduce"),
    "sum_out": ("all_reduce", None),
    "gather": ("all_gather", "reduce_scatter"),
    "scatter_sum": ("reduce_scatter", "all_gather"),
    "split": (None, "all_gather"),
    "gather_whole": ("all_gather", None),
}
"""Crossing -> the collectives of forward and of its gradient."""


def crossing_calls(group: Group, crossings: Mapping[Crossing, int]) -> Iterator[Call]:
    """The collectives of a step, from how often each crossing was made in it."""
    for crossing, times in crossings.items():
        for _ in range(times):
            yield from _calls(group, crossing)


def _calls(group: Group, crossing: Crossing) -> Iterator[Call]:
    if group.ranks == 1:
        return
    forward, backward = SENDS[crossing.how]
    if forward is not None:
        phase = "backward" if crossing.again else "forward"
        yield group.axis, phase, forward, crossing.whole_bytes, group.ranks
    if backward is not None and crossing.gradient and not crossing.again:
        yield group.axis, "backward", backward, crossing.whole_bytes, group.ranks


def gathered_logits_bytes(*, rows: int, vocabulary: int, ranks: int, itemsize: int) -> int:
    """Bytes of the all-gather that gathers cut logits: every part as long as the longest."""
    return rows * ranks * -(-vocabulary // ranks) * itemsize
