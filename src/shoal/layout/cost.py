"""What an operation costs, roughly: enough to balance the stages of a pipeline.

Matrix products count their multiplications and additions; everything counts the bytes it reads and writes, at
FLOPS_PER_BYTE operations each (a device that computes so many operations in the time it moves a byte). Backward costs
twice the forward for products and about once for the rest, so that forward alone gives the proportions.
"""

from __future__ import annotations

from math import prod

from shoal.layout.recorded import Op, Ref, Trace

FLOPS_PER_BYTE = 4.0
"""One core of a server CPU: some 40 GFLOP/s of float32 beside 10 GB/s."""

VIEWS = frozenset(
    "view _unsafe_view t transpose permute expand unsqueeze squeeze detach alias slice select split split_with_sizes "
    "as_strided reshape unbind chunk lift_fresh unfold diagonal view_as_real view_as_complex real movedim narrow "
    "_reshape_alias".split()
)
"""Operations that look at the same memory in another way."""
UNWRITTEN = frozenset(["empty", "empty_like"])
FREE = VIEWS | UNWRITTEN

LEFT = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products -> the place of the left matrix among their tensors; the right one follows it."""


def flops(trace: Trace, op: Op) -> float:
    """Multiplications and additions of a matrix product; 0 for anything else."""
    values = trace.values
    tensors = [values[arg.value].shape for arg in op.args if isinstance(arg, Ref)]
    out = values[op.outputs[0]].shape if op.outputs else ()
    if op.name in LEFT:
        return 2.0 * prod(out) * tensors[LEFT[op.name]][-1]
    if op.name == "convolution":
        return 2.0 * prod(out) * prod(tensors[1][1:])
    if op.name.startswith("_scaled_dot_product"):
        q, k = tensors[0], tensors[1]
        return 4.0 * prod(q) * k[-2]
    return 0.0


def cost(trace: Trace, op: Op) -> float:
    """Operations, bytes moved included."""
    if op.name in FREE:
        return 0.0
    moved = sum(trace.values[value].bytes for value in {*op.inputs, *op.outputs})
    if op.name == "embedding":
        # The table is not read as a whole, but its gradient and its update are.
        moved = sum(trace.values[value].bytes for value in op.outputs) + 2 * trace.values[op.inputs[0]].bytes
    return flops(trace, op) + FLOPS_PER_BYTE * moved
