"""A model whose own forward works on the sequence between its modules: `h = h + layer(h)`, attention as a function.

Such a model runs as a whole as if it had the full sequence (`global_view.py`). Whether that is worth anything is judged
by the traced operations: from the place where the sequence is cut to the last attention, only attention may need
other positions. Masks and lengths, which no parameter has touched, are gathered wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.layout.context.loss_trial import LossTrial
from shoal.layout.context.plan import CannotCutSequence, ContextPlan, Holder, NothingAttends, Places, named
from shoal.layout.context.to_loss import to_the_loss
from shoal.layout.cuts import Cut
from shoal.layout.global_view import CannotFollow, Walk, factors, follow, is_regular
from shoal.layout.recorded import Trace, TracedCall
from shoal.layout.tensor.spread import Graph
from shoal.layout.written_attention import attentions


def root_plan(graph: Graph, blocks: list[TracedCall], *, causal: bool, trial: LossTrial | None) -> ContextPlan:
    """The plan of a model that is one region: cut where its arguments enter, or else where the first block is called.
    Raises CannotCutSequence with the reason of the cut that came furthest."""
    trace = graph.trace
    roots = trace.calls_of("")
    if len(roots) != 1:
        raise CannotCutSequence(f"{named(trace.model, '')} is called {len(roots)} times for a batch")
    furthest, reason = -1, None
    for entry, given, length in (*_entries(trace, roots[0]), *_first_blocks(trace, blocks)):
        try:
            return _plan(graph, roots[0], entry, given, length, causal=causal, trial=trial)
        except NothingAttends:
            continue
        except _Refused as refusal:
            if refusal.at > furthest:
                furthest, reason = refusal.at, refusal
    raise reason or NothingAttends("no attention was found")


class _Refused(CannotCutSequence):
    """`at`: the operation that was reached."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at


def _entries(trace: Trace, root: TracedCall) -> Iterator[tuple[TracedCall, dict[int, Cut], int]]:
    """The model's arguments that may hold the sequence: samples by positions, one length after the other."""
    held = [trace.values[v] for v in root.arguments if v is not None]
    wide = [value for value in held if len(value.shape) >= 2 and value.shape[0] == trace.samples]
    for length in dict.fromkeys(value.shape[1] for value in wide):
        yield root, {value.number: Cut(1, (length,)) for value in wide if value.shape[1] == length}, length


def _first_blocks(trace: Trace, blocks: list[TracedCall]) -> Iterator[tuple[TracedCall, dict[int, Cut], int]]:
    """The first block that is given a sequence of vectors."""
    for call in blocks:
        for value in call.arguments:
            if value is not None and trace.values[value].learned and len(trace.values[value].shape) == 3:
                dim = 1 if trace.values[value].shape[0] == trace.samples else 0
                length = trace.values[value].shape[dim]
                yield call, {value: Cut(dim, (length,))}, length
                return


def _plan(
    graph: Graph,
    root: TracedCall,
    entry: TracedCall,
    given: dict[int, Cut],
    length: int,
    *,
    causal: bool,
    trial: LossTrial | None,
) -> ContextPlan:
    trace = graph.trace
    walk, last = _walk(graph, root, entry, given, length)
    _require_by_position(graph, walk, last)
    cut = {n: walk.cuts[v] for n, v in enumerate(root.results) if v is not None and v in walk.cuts}
    irregular = next((n for n, each in cut.items() if not is_regular(each, length)), None)
    if irregular is not None:
        raise _Refused("the model gives back a tensor in which positions are no dimension", root.stop)
    batch, why = to_the_loss(graph, root, walk.cuts, length=length, trial=trial)
    full = [v for v in root.results if v is not None and v not in walk.cuts and trace.values[v].learned]
    if batch is not None and any(n >= root.stop and graph.live[n] for v in full for n in graph.users.get(v, ())):
        # Each rank would add all of it to its part of the loss.
        batch, why = None, "the loss reads an output for all positions together"
    leaves = {n: _places(given[v], length) for n, v in enumerate(entry.arguments) if v in given}
    return ContextPlan(
        length=length,
        dim=next(iter(given.values())).dim,
        blocks=(entry.path,),
        stream=min(leaves),
        extras={},
        masks={},
        causal=causal,
        batch=batch,
        why_whole=why,
        whole_from=_whole_from(graph, walk, last),
        holders={
            "": Holder(
                arguments=leaves if entry is root else {},
                results={n: _places(each, length) for n, each in cut.items()} if batch is not None else {},
            )
        },
    )


def _whole_from(graph: Graph, walk: Walk, last: int) -> str:
    """The first module that is called behind the last attention with something that was gathered."""
    gathered = (s.op.number for s in walk.steps if any(graph.values[v].learned for v in s.gathered))
    first = next((number for number in gathered if number > last), None)
    return "" if first is None else next((c.path for c in graph.trace.calls if c.first > first), "")


def _places(cut: Cut, length: int) -> Places:
    return cut.dim, factors(cut, length)[1]


def _walk(graph: Graph, root: TracedCall, entry: TracedCall, given: dict[int, Cut], length: int) -> tuple[Walk, int]:
    """The cut followed to the model's end, and the number of the last operation that attends."""
    trace = graph.trace

    def through(first: int, stop: int, cuts: dict[int, Cut]) -> Walk:
        ops = [op for op in graph.ops[first:stop] if graph.live[op.number]]
        return follow(graph, ops, cuts, length, attention=trace.attention)

    try:
        walk = through(entry.first, entry.stop, given)
        if entry is not root:
            # Around the first block the model still has the sequence in full.
            behind = through(entry.stop, root.stop, {v: c for v, c in walk.cuts.items() if v not in given})
            walk = Walk(length, behind.cuts, [*walk.steps, *behind.steps])
    except CannotFollow as refusal:
        raise _Refused(str(refusal), root.stop) from None
    ends = [last for _, last, _ in attentions(walk)]
    for each in trace.attention:
        read = (each.query, each.key, each.value)
        if not any(value in walk.cuts for value in read):
            continue
        if any(len(trace.values[v].shape) != 4 or v not in walk.cuts or walk.cuts[v].dim != 2 for v in read):
            where = named(trace.model, each.module)
            raise _Refused(f"{where} attends over something other than the sequence", each.first)
        ends.append(each.stop - 1)
    if not ends:
        raise NothingAttends("no attention was found")
    return walk, max(ends)


def _require_by_position(graph: Graph, walk: Walk, last: int) -> None:
    """Up to the last attention, what else needs other positions is refused."""
    attending = {number for _, _, ops in attentions(walk) for number in ops}
    for step in walk.steps:
        learned = [value for value in step.gathered if graph.values[value].learned]
        if learned and step.op.number <= last and step.op.number not in attending:
            where = named(graph.trace.model, step.op.module)
            why = step.gathered[learned[0]]
            why = {"sum": "it sums over them", "pairs": "it puts each beside the others"}.get(why, why)
            raise _Refused(f"{where} ({step.op.name}) mixes positions outside attention: {why}", step.op.number)
