"""Behind the last block: whether the loss treats positions one by one, and which entries of the batch it reads so."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.layout.context.loss_trial import LossTrial
from shoal.layout.context.plan import CannotCutSequence, named
from shoal.layout.cuts import Cut
from shoal.layout.recorded import Op, TracedCall
from shoal.layout.tensor.dims import bind
from shoal.layout.tensor.segments import NeedsSegments, Refuted
from shoal.layout.tensor.spread import Graph


def to_the_loss(
    graph: Graph, last: TracedCall, cuts: Mapping[int, Cut], *, length: int, trial: LossTrial | None
) -> tuple[dict[str, int] | None, str]:
    """Which entries of the batch the loss reads position by position, or None and why it cannot."""
    trace = graph.trace
    result = next((v for v in last.results if v is not None and v in cuts), None)
    if result is None:
        return None, f"{named(trace.model, last.path)} gives back no cut sequence"
    # Whatever else blocks made for each position and is used behind them is cut there as well.
    open_values = [result, *_used_behind(graph, last, cuts, stream=result)]
    known, batch = {value: cuts[value] for value in open_values}, {}
    while open_values:
        value = open_values.pop(0)
        for number in [n for n in graph.users.get(value, ()) if n >= last.stop and graph.live[n]]:
            op = graph.ops[number]
            try:
                others, sums = _follow_loss(graph, op, value, known)
            except (Refuted, NeedsSegments):
                return None, f"{op.name} in {op.module or 'the loss'} needs the whole sequence"
            for other, found in others.items():
                if known.get(other, found) != found:
                    return None, f"{op.name} in {op.module or 'the loss'} mixes positions"
                if other in known or (sums and other in op.outputs):
                    continue
                made = graph.values[other]
                entry, dim = _batch_entry(graph, other, found)
                if entry is not None:
                    batch[entry] = dim
                elif made.producer < last.stop:
                    return None, f"{op.name} in {op.module or 'the loss'} meets a tensor made for all positions"
                else:
                    open_values.append(other)
                known[other] = found
            if sums and (number < trace.model_stop or op.name not in ("sum", "nll_loss_forward", "nll_loss2d_forward")):
                return None, f"{op.name} in {op.module or 'the loss'} sums over positions"
    if trial is not None and (wrong := trial(known, batch, length)):
        return None, f"the loss is not a sum over positions: {wrong}"
    return batch, ""


def _used_behind(graph: Graph, last: TracedCall, cuts: Mapping[int, Cut], *, stream: int | None) -> list[int]:
    """Cut values beside the stream that are read behind the last block."""
    behind = [v for v in cuts if any(n >= last.stop and graph.live[n] for n in graph.users.get(v, ()))]
    return [value for value in behind if value != stream]


def require_one_stream(graph: Graph, last: TracedCall, cuts: Mapping[int, Cut], why: str) -> None:
    """What is gathered behind the blocks is the stream alone."""
    stream = next((v for v in last.results if v is not None and v in cuts), None)
    for value in _used_behind(graph, last, cuts, stream=stream):
        maker = graph.ops[graph.values[value].producer]
        raise CannotCutSequence(
            f"a result of {maker.name} in {maker.module or 'the model'}, one for each position, is used behind the "
            f"blocks beside the stream, and there the whole sequence is needed ({why})"
        )


def _follow_loss(graph: Graph, op: Op, value: int, known: dict[int, Cut]) -> tuple[dict[int, Cut], bool]:
    """As `Graph.follow`; a negative log likelihood reads its targets sample by sample, and sums."""
    if op.name in ("nll_loss_forward", "nll_loss2d_forward") and value == op.inputs[0] and known[value].dim != 1:
        cut = known[value]
        rows = Cut(cut.dim if cut.dim == 0 else cut.dim - 1, cut.segments)
        if bind(op, graph.values).named["reduction"] == 0:
            return {op.inputs[1]: rows, op.outputs[0]: rows}, False
        return {op.inputs[1]: rows}, True
    if op.name == "sum" and len(op.args) == 1:
        return {}, True  # Over everything: each rank's own positions are one term of it.
    return graph.follow(op, value, known[value], known)


def _batch_entry(graph: Graph, value: int, cut: Cut) -> tuple[str | None, int]:
    """The entry of the batch that a value is a view of, and its dimension that is cut."""
    while graph.values[value].source != "batch":
        producer = graph.values[value].producer
        if producer < 0 or len(graph.ops[producer].inputs) != 1:
            return None, 0
        source = graph.ops[producer].inputs[0]
        try:
            others, _ = graph.follow(graph.ops[producer], value, cut, {value: cut})
        except (Refuted, NeedsSegments):
            return None, 0
        if source not in others:
            return None, 0
        value, cut = source, others[source]
    return graph.values[value].name, cut.dim
