"""What context parallelism may cut of a model: the sequence, from the first block to the last one, or to the loss.

Inside the blocks every operation but attention must treat positions one by one. What else a block is given for every
position (rotary tables, masks) is cut along with the sequence where a block gets it as an argument. A module that
writes attention out itself, or makes masks and tables for it, is not looked into: it runs as if it had the full
sequence (`global_view.py`). A model whose own forward works on the sequence between its blocks (`h = h + layer(h)`)
is such a module as a whole (`root.py`). Behind the blocks the sequence stays cut if the loss treats positions one by
one, else it is gathered.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.layout.blocks import blocks
from shoal.layout.context.follower import Follower
from shoal.layout.context.held import holder_plans
from shoal.layout.context.loss_trial import LossTrial
from shoal.layout.context.plan import ByStructure, CannotCutSequence, ContextPlan, Made, NothingAttends, named
from shoal.layout.context.root import root_plan
from shoal.layout.context.through import through_blocks
from shoal.layout.context.to_loss import require_one_stream, to_the_loss
from shoal.layout.cuts import Cut
from shoal.layout.global_view import CannotFollow
from shoal.layout.recorded import Trace, TracedAttention, TracedCall
from shoal.layout.tensor.spread import Graph
from shoal.layout.written_attention import holders


def context_plan(trace: Trace, *, by_position: Collection[str] = (), trial: LossTrial | None = None) -> ContextPlan:
    """Raises CannotCutSequence, with the module and the reason, where the model mixes positions outside attention.
    `by_position`: modules known to treat positions one by one, whatever their code looks like (experts).
    `trial`: whether the loss of all positions is the sum of its parts."""
    graph = Graph(trace)
    try:
        return _by_blocks(graph, by_position, trial)
    except CannotCutSequence as refusal:
        try:
            causal = any(a.causal or has_rows(graph, a) for a in trace.attention)
            return root_plan(graph, _block_calls(trace), causal=causal, trial=trial)
        except NothingAttends:
            raise refusal from None
        except CannotCutSequence as other:
            raise (other if isinstance(refusal, ByStructure) else refusal) from None


def _by_blocks(graph: Graph, by_position: Collection[str], trial: LossTrial | None) -> ContextPlan:
    written = _written(graph)
    while True:
        try:
            return _plan(graph, written, by_position, trial)
        except Made as refusal:
            # Masks and tables that the code makes for attention come out right where it has the full sequence.
            more = _holder_of(graph, refusal.op, written)
            if more is None:
                raise
            written = sorted([*written, *more], key=lambda call: call.first)


def _plan(
    graph: Graph, written: list[TracedCall], by_position: Collection[str], trial: LossTrial | None
) -> ContextPlan:
    trace = graph.trace
    inside = {attention.module for attention in trace.attention} | {call.path for call in written}
    calls = [c for c in _block_calls(trace) if any(_within(c, m) for m in inside)]
    if not inside:
        raise ByStructure(_no_attention(trace))
    outside = next((m for m in inside if not any(_within(call, m) for call in calls)), None)
    if outside is not None:
        raise ByStructure(f"{named(trace.model, outside)} attends outside the blocks")
    repeated = next((call.path for call in calls if len(trace.calls_of(call.path)) > 1), None)
    if repeated is not None:
        raise ByStructure(f"{repeated} runs several times, so its ends are not those of the blocks")
    stream, leaf = _stream(trace, calls[0])
    shape = trace.values[stream].shape
    beside = [n for n in graph.users.get(stream, ()) if n >= calls[0].stop and graph.live[n]]
    if beside:
        where = named(trace.model, trace.ops[beside[0]].module)
        raise ByStructure(f"what {calls[0].path} is given is used beside it, by {where}, for all positions")
    dim = _sequence_dim(trace, stream)
    closed = [call for call in trace.calls if call.path in by_position]
    torn = next((c.path for c in written for e in closed if c.first <= e.first and e.stop <= c.stop), None)
    if torn is not None:
        raise CannotCutSequence(f"{torn} holds attention written out and experts in one module; make them two modules")
    follower = Follower(graph, calls, closed, written)
    masks = through_blocks(follower, stream, Cut(dim, (shape[dim],)))
    batch, why = to_the_loss(graph, calls[-1], follower.cuts, length=shape[dim], trial=trial)
    if batch is None:
        require_one_stream(graph, calls[-1], follower.cuts, why)
    return ContextPlan(
        length=shape[dim],
        dim=dim,
        blocks=tuple(call.path for call in calls),
        stream=leaf,
        extras=follower.extras,
        masks=masks,
        causal=any(a.causal or has_rows(graph, a) for a in trace.attention),
        batch=batch,
        why_whole=why,
        holders=holder_plans(follower, shape[dim]),
    )


def _block_calls(trace: Trace) -> list[TracedCall]:
    paths = {path for path, _ in blocks(trace.model)}
    return [call for call in trace.calls if call.path in paths]


def _sequence_dim(trace: Trace, stream: int) -> int:
    return 1 if trace.values[stream].shape[0] == trace.samples else 0


def _written(graph: Graph) -> list[TracedCall]:
    """The calls that hold attention written out, in the blocks."""
    found: list[TracedCall] = []
    why = ""
    for call in _block_calls(graph.trace):
        try:
            stream, _ = _stream(graph.trace, call)
            dim = _sequence_dim(graph.trace, stream)
            found += holders(graph, call, stream, Cut(dim, (graph.values[stream].shape[dim],)))
        except CannotCutSequence:
            continue
        except CannotFollow as refusal:
            why = why or str(refusal)
    if why and not found and not graph.trace.attention:
        raise CannotCutSequence(why)
    return found


def _holder_of(graph: Graph, op: int, written: list[TracedCall]) -> list[TracedCall] | None:
    """All calls of the modules that call attention like the one in which an operation lies; None if none does, or they
    are known."""
    trace = graph.trace
    within = [a.module for a in trace.attention for c in trace.calls_of(a.module) if c.first <= op < c.stop]
    if not within:
        return None
    kind = type(trace.model.get_submodule(within[0]))
    same = {a.module for a in trace.attention if type(trace.model.get_submodule(a.module)) is kind}
    more = [c for c in trace.calls if c.path in same and c not in written]
    return more or None


def _no_attention(trace: Trace) -> str:
    """What was looked at, where nothing attends."""
    found = _block_calls(trace)
    if not found:
        return (
            "no attention was found, for the model has no blocks: modules in a list, each called with the sequence. "
            "LayoutHints(blocks=...) names them"
        )
    return (
        f"no attention was found: no product in {found[0].path} and its like compares positions of the sequence with "
        "each other and is summed over them again"
    )


def _within(call: TracedCall, module: str) -> bool:
    return module == call.path or module.startswith(call.path + ".")


def _stream(trace: Trace, call: TracedCall) -> tuple[int, int]:
    for leaf, value in enumerate(call.arguments):
        if value is not None and trace.values[value].learned and len(trace.values[value].shape) == 3:
            return value, leaf
    raise ByStructure(f"{call.path} is given no sequence of vectors (samples, positions, features)")


def has_rows(graph: Graph, attention: TracedAttention) -> bool:
    """Whether its mask differs from position to position, as a causal one does; one that hides padding does not."""
    return attention.mask is not None and graph.values[attention.mask].shape[-2] > 1
