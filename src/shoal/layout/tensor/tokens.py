"""Whether the residual stream between regions can be split along the tokens (sequence parallelism).

Between regions a block usually treats tokens one by one: norms over the features, sums, dropout. Then each rank can
keep a part of the tokens there; they are all-gathered before columns and reduce-scattered after rows. An operation
outside the regions that mixes tokens forbids it.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from shoal.layout.blocks import blocks
from shoal.layout.cuts import Cut
from shoal.layout.tensor.plan import TensorPlan
from shoal.layout.tensor.projections import Projection, same_tensor
from shoal.layout.tensor.segments import NeedsSegments, Refuted
from shoal.layout.tensor.spread import Graph


def token_dimension(
    graph: Graph, known: dict[str, Projection], *, columns: Collection[str], rows: Collection[str]
) -> tuple[int | None, str, int]:
    """(dimension, "", tokens) of the stream, or (None, why not, 0)."""
    paths = {path for path, _ in blocks(graph.trace.model)}
    holding = {path for path in paths if any(row.startswith(path + ".") for row in rows)}
    calls = [call for call in graph.trace.calls if call.path in (holding or paths)]
    if not calls or not rows:
        why = "no block contains a region" if not calls else "nothing is split between columns and rows"
        return None, why, 0
    repeated = next((call.path for call in calls if len(graph.trace.calls_of(call.path)) > 1), None)
    if repeated is not None:
        return None, f"{repeated} is called several times, so the blocks do not form one chain", 0
    first, stop = calls[0].first, max(call.stop for call in calls)
    given = [v for v in calls[0].arguments if v is not None and graph.values[v].dtype.is_floating_point]
    stream = next((v for v in given if len(graph.values[v].shape) == 3), None)
    if stream is None:
        return None, f"{calls[0].path} is given no sequence of vectors (samples, tokens, features)", 0
    shape = graph.values[stream].shape
    if any(number >= calls[0].stop and graph.live[number] for number in graph.users.get(stream, ())):
        return None, f"the input of {calls[0].path} is also used outside it", 0
    dim = 1 if shape[0] == graph.trace.samples else 0 if shape[1] == graph.trace.samples else -1
    if dim < 0:
        return None, f"{calls[0].path} is given {list(shape)}, of which no dimension is the samples", 0
    gathers = {number for path in columns for number in known[path].ops}
    scatters = {number for path in rows for number in known[path].ops}
    try:
        cut = _follow(graph, stream, Cut(dim, (shape[dim],)), gathers, scatters, range(first, stop))
        last = max(calls, key=lambda call: call.stop)
        _gathered_at_the_end(graph, cut, {v for v in last.results if v is not None}, range(first, stop))
    except Refuted as refusal:
        return None, str(refusal), 0
    return dim, "", shape[dim]


def _follow(graph: Graph, stream: int, cut: Cut, gathers: set[int], scatters: set[int], within: range) -> set[int]:
    """All values that are split with the stream."""
    cuts = {stream: cut}
    open_values = [stream]
    while open_values:
        value = open_values.pop(0)
        producer = graph.values[value].producer
        before = [producer] if producer in within else []
        for number in before + [n for n in graph.users.get(value, ()) if n in within and graph.live[n]]:
            op = graph.ops[number]
            if (number in gathers and value in op.inputs) or (number in scatters and value in op.outputs):
                continue
            where = f"{op.name} in {op.module or 'the model'}"
            try:
                others, sums = graph.follow(op, value, cuts[value], cuts)
            except Refuted as refusal:
                raise Refuted(f"{where}: {refusal}") from None
            except NeedsSegments:
                raise Refuted(f"{where}: it divides the dimension of the tokens") from None
            if sums:
                raise Refuted(f"{where}: it sums over the tokens")
            for other, found in others.items():
                if other in cuts:
                    if cuts[other] != found:
                        raise Refuted(f"{where}: it mixes the tokens")
                    continue
                known = graph.values[other]
                if (known.producer not in within and known.source != "op") or known.producer not in within:
                    made = known.name or "a value"
                    raise Refuted(f"{where}: it reads {made}, computed before the blocks for all tokens")
                cuts[other] = found
                open_values.append(other)
    return set(cuts)


def _gathered_at_the_end(graph: Graph, cut: set[int], results: set[int], within: range) -> None:
    """The output of the last block is gathered; no other value of the stream may be read after it."""
    ends = {same_tensor(value, graph) for value in results}
    for value in sorted(cut):
        after = [n for n in graph.users.get(value, ()) if n >= within.stop and graph.live[n]]
        producer = graph.values[value].producer
        made_within = producer >= within.start and same_tensor(value, graph) not in ends
        if made_within and (after or value in graph.outputs):
            where = graph.ops[producer].module
            raise Refuted(f"the result of {where or 'the model'} is read again after the last block")


def stream_blocks(model: nn.Module, plan: TensorPlan) -> tuple[str, ...]:
    """The blocks of the residual stream: of all chains of identical blocks, the one with most regions."""
    chains: dict[str, list[str]] = {}
    for path, _ in blocks(model):
        chains.setdefault(path.rpartition(".")[0], []).append(path)

    def held(chain: list[str]) -> int:
        return sum(any(r.columns[0].startswith(path + ".") for path in chain) for r in plan.regions)

    most: list[str] = max(chains.values(), key=held) if chains else []
    # An embedding may be in the same list as the blocks: the stream begins and ends where regions do.
    holding = [n for n, path in enumerate(most) if any(r.columns[0].startswith(path + ".") for r in plan.regions)]
    return tuple(most[holding[0] : holding[-1] + 1]) if holding else ()
