"""The cut sequence from the first block to the last, around attention and its masks."""

from __future__ import annotations

from shoal.layout.context.follower import Follower, argument_behind, enter, past, step
from shoal.layout.context.held import hold
from shoal.layout.context.plan import CannotCutSequence, Made
from shoal.layout.cuts import Cut
from shoal.layout.recorded import Call
from shoal.layout.tensor.spread import Graph


def through_blocks(follower: Follower, stream: int, cut: Cut) -> dict[str, tuple[int, ...]]:
    """Follows the cut from block to block, around attention; gives the masks that blocks are given."""
    graph, trace = follower.graph, follower.graph.trace
    first, stop = follower.calls[0].first, max(call.stop for call in follower.calls)
    attentions = follower.attention()
    barred = {number for a in attentions for number in range(a.first, a.stop)}
    barred |= {number for call in (*follower.closed, *follower.holders) for number in range(call.first, call.stop)}
    follower.cuts = {stream: cut}
    follower.open_values = [stream]
    waiting = list(follower.holders)
    while follower.open_values or waiting:
        if not follower.open_values:
            hold(follower, waiting.pop(0), cut.size, first)
            continue
        value = follower.open_values.pop(0)
        for attention in attentions:
            if value == attention.query:
                enter(follower, attention.output, follower.cuts[value], first)
        for call in follower.closed:
            if value in call.arguments and trace.values[value].learned:
                past(follower, call, value, first)
        producer = graph.values[value].producer
        before = [producer] if first <= producer < stop else []
        users = [n for n in graph.users.get(value, ()) if first <= n < stop and graph.live[n]]
        for number in before + users:
            if number not in barred:
                step(follower, number, value, first)
    masks: dict[str, tuple[int, ...]] = {}
    for attention in attentions:
        for operand in (attention.query, attention.key, attention.value):
            there = follower.cuts.get(operand)
            if there is None or there.dim != len(trace.values[operand].shape) - 2:
                raise CannotCutSequence(f"{attention.module} attends over something other than the sequence")
        if attention.mask is not None:
            block = follower.call_at(attention.first)
            assert block is not None
            leaf = _mask_argument(graph, block, attention.mask)
            if leaf is None:
                why = f"{attention.module} makes its own mask, for the positions that it sees"
                raise Made(why, attention.first)
            masks[block.path] = (*masks.get(block.path, ()), leaf)
    return masks


def _mask_argument(graph: Graph, call: Call, mask: int) -> int | None:
    """The block's argument that a mask is. Rows are cut where the argument has them, so the code between may neither
    make them nor choose among them."""
    leaf = argument_behind(graph, call, mask)
    source = call.arguments[leaf] if leaf is not None else None
    if source is None or graph.values[source].shape[-2:] != graph.values[mask].shape[-2:]:
        return None
    while mask != source:
        op = graph.ops[graph.values[mask].producer]
        if op.name == "slice":
            return None
        mask = op.inputs[0]
    return leaf
