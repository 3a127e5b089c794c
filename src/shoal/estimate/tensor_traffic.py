"""What tensor parallelism sends, in closed form.

For a region whose columns read a tensor of n bytes and whose rows write one of m bytes, both whole, on P ranks:

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

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from shoal.estimate.traffic import Call, Group
from shoal.layout.crossings import Crossing

Between = Literal["whole", "sequence", "batch"]

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


def region_calls(
    group: Group,
    *,
    between: Between,
    input_bytes: Iterable[int],
    output_bytes: Iterable[int],
    input_gradient: bool = True,
    recomputed_inputs: bool = False,
    recomputed_outputs: bool = False,
    inside_bytes: Iterable[int] = (),
) -> tuple[Call, ...]:
    """One forward and backward of a region: `input_bytes` of each different tensor that its columns read,
    `output_bytes` of each that its rows write, both as whole tensors; `inside_bytes` of each whole parameter that meets
    cut values and whose gradient is summed at once, not with the others after backward."""
    into, out = ("copy_in", "sum_out") if between == "whole" else ("gather", "scatter_sum")
    made = [Crossing(how=into, whole_bytes=n, gradient=input_gradient) for n in input_bytes]
    made += [Crossing(how=out, whole_bytes=n) for n in output_bytes]
    made += [Crossing(how="copy_in", whole_bytes=n) for n in inside_bytes]
    again = [Crossing(how=into, whole_bytes=n, again=True) for n in input_bytes if recomputed_inputs]
    again += [Crossing(how=out, whole_bytes=n, again=True) for n in output_bytes if recomputed_outputs]
    return tuple(call for crossing in made + again for call in _calls(group, crossing))


def stream_calls(group: Group, *, stream_bytes: int) -> tuple[Call, ...]:
    """The residual stream cut along the sequence before the first block and made whole after the last."""
    ends = [Crossing(how=how, whole_bytes=stream_bytes) for how in ("split", "gather_whole")]
    return tuple(call for crossing in ends for call in _calls(group, crossing))


def vocabulary_calls(
    group: Group,
    *,
    embedding_bytes: int = 0,
    head_bytes: int = 0,
    loss_rows: int = 0,
    loss_itemsize: int = 4,
    label_smoothing: bool = False,
) -> tuple[Call, ...]:
    """One forward and backward of an embedding whose result has so many bytes, of a head whose input has so many,
    and of a cross entropy over so many rows of cut logits; 0 where there is none."""
    made = []
    if embedding_bytes:
        made.append(Crossing(how="sum_out", whole_bytes=embedding_bytes))
    if head_bytes:
        made.append(Crossing(how="copy_in", whole_bytes=head_bytes))
    if loss_rows:
        sums = 3 if label_smoothing else 2
        made += [Crossing(how="sum_out", whole_bytes=k * loss_rows * loss_itemsize) for k in (1, sums)]
    return tuple(call for crossing in made for call in _calls(group, crossing))


def gathered_logits_bytes(*, rows: int, vocabulary: int, ranks: int, itemsize: int) -> int:
    """Bytes of the all-gather that makes cut logits whole: every part as long as the longest."""
    return rows * ranks * -(-vocabulary // ranks) * itemsize
