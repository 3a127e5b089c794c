"""What tensor parallelism sends, from shapes that a test writes down: the formulas of `estimate/tensor_traffic.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.estimate.tensor_traffic import crossing_calls
from shoal.estimate.traffic import Call, Group
from shoal.layout.crossings import Crossing


def region_calls(
    group: Group,
    *,
    between: str,
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
    return tuple(crossing_calls(group, Counter(made + again)))


def stream_calls(group: Group, *, stream_bytes: int) -> tuple[Call, ...]:
    """The residual stream cut along the sequence before the first block and made whole after the last."""
    ends = [Crossing(how=how, whole_bytes=stream_bytes) for how in ("split", "gather_whole")]
    return tuple(crossing_calls(group, Counter(ends)))


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
    return tuple(crossing_calls(group, Counter(made)))
