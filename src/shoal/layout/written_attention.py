"""Attention that a model writes out itself, found by what it computes and not by its name.

A product whose two operands both carry the sequence makes a score for each pair of positions; a later product that
sums over one of the two makes one result for each position again. What happens in between (scale, masks, alibi, a soft
cap, softmax, dropout) is the model's affair. The innermost module that spans both products holds the attention.
"""

from __future__ import annotations

from shoal.layout.cuts import Cut
from shoal.layout.global_view import PRODUCTS, Walk, follow
from shoal.layout.recorded import Call, Trace
from shoal.layout.tensor.spread import Graph


def holders(graph: Graph, call: Call, stream: int, cut: Cut) -> list[Call]:
    """The calls within a block that hold attention other than `scaled_dot_product_attention` called by the model.
    Raises CannotFollow where the block writes into positions in place."""
    trace = graph.trace
    ops = [op for op in trace.ops[call.first : call.stop] if graph.live[op.number]]
    walk = follow(graph, ops, {stream: cut}, cut.size, attention=trace.attention)
    found: list[Call] = []
    for first, last, _ in attentions(walk):
        holder = _innermost(trace, call, first, last)
        if holder not in found:
            found.append(holder)
    return [each for each in found if not any(each is not other and _contains(other, each) for other in found)]


def attentions(walk: Walk) -> list[tuple[int, int, frozenset[int]]]:
    """(first operation, last operation, all that work on its scores) of each attention: from the scores of pairs to
    the sum over one of them."""
    found = []
    scores: dict[int, frozenset[int]] = {}
    """Value -> the operations by which it came from a product of pairs."""
    for step in walk.steps:
        op = step.op
        if step.attends:
            found.append((op.number, op.number, frozenset([op.number])))
            continue
        origins = frozenset().union(*(scores[value] for value in op.inputs if value in scores))
        product = op.name in PRODUCTS
        if product and not origins and "pairs" in step.gathered.values():
            scores.update(dict.fromkeys(op.outputs, frozenset([op.number])))
        elif product and origins and "sum" in step.gathered.values():
            found.append((min(origins), op.number, origins | {op.number}))
        elif origins:
            scores.update(dict.fromkeys(op.outputs, origins | {op.number}))
    return found


def _contains(outer: Call, inner: Call) -> bool:
    return outer.first <= inner.first and inner.stop <= outer.stop and outer.number != inner.number


def _innermost(trace: Trace, block: Call, first: int, last: int) -> Call:
    """The smallest call that spans both operations."""
    spanning = [c for c in trace.calls if c.first <= first and last < c.stop and _within(c.path, block.path)]
    return min(spanning, key=lambda c: (c.stop - c.first, -c.path.count(".")), default=block)


def _within(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")
