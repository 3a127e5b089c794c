"""What context parallelism may cut of a model: the sequence, from the first block to the last one, or to the loss.

Inside the blocks every operation but attention must treat positions one by one. What else a block is given for every
position (rotary tables, masks) is cut along with the sequence where a block gets it as an argument. A module that
writes attention out itself, or makes masks and tables for it, is not looked into: it runs as if it had the full
sequence (`global_view.py`). Behind the blocks the sequence stays cut if the loss treats positions one by
one, else it is gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal.layout.blocks import blocks
from shoal.layout.cuts import Cut
from shoal.layout.global_view import CannotFollow, factors, follow, is_regular
from shoal.layout.recorded import Op, Trace
from shoal.layout.recorded import TracedAttention as Attention
from shoal.layout.recorded import TracedCall as Call
from shoal.layout.tensor.segments import NeedsSegments, Refuted
from shoal.layout.tensor.spread import Graph
from shoal.layout.written_attention import holders

VIEWS = ("expand", "slice", "view", "unsqueeze", "_to_copy")

Leaves = dict[int, int]
"""Argument of a block, laid flat -> the dimension that is the sequence."""


Places = tuple[int, int]
"""Of a cut tensor: its dimension that holds the positions, and how many elements of that dimension each has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A module that holds attention and runs as if it had the full sequence."""

    arguments: Mapping[int, Places]
    """Its arguments that are cut, laid flat."""
    results: Mapping[int, Places]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPlan:
    """How the sequence is cut."""

    length: int
    dim: int
    """The sequence's dimension of the stream between blocks."""
    blocks: tuple[str, ...]
    stream: int
    """Which argument of a block, laid flat, is the stream."""
    extras: Mapping[str, Leaves]
    """Block -> its other arguments that are cut."""
    masks: Mapping[str, tuple[int, ...]]
    """Block -> its arguments that are masks of positions by positions."""
    causal: bool
    batch: Mapping[str, int] | None
    """Entries of the batch that the loss reads position by position -> their dimension; None: the loss needs the whole
    sequence, which is gathered behind the last block."""
    why_whole: str = ""
    holders: Mapping[str, Holder] = field(default_factory=dict)
    """Modules that write attention out themselves."""


@dataclass
class _Follower:
    graph: Graph
    calls: list[Call]
    closed: list[Call]
    """Calls that are not looked into: what they give back is cut as what they are given."""
    holders: list[Call] = field(default_factory=list)
    """Calls that run as if they had the full sequence, in order."""
    cuts: dict[int, Cut] = field(default_factory=dict)
    extras: dict[str, Leaves] = field(default_factory=dict)
    open_values: list[int] = field(default_factory=list)

    def call_at(self, op: int) -> Call | None:
        return next((call for call in self.calls if call.first <= op < call.stop), None)

    def attention(self) -> list[Attention]:
        """Calls of scaled_dot_product_attention outside the holders."""
        return [a for a in self.graph.trace.attention if not any(c.first <= a.first < c.stop for c in self.holders)]


class CannotCutSequence(ValueError):
    """Some operation needs the whole sequence."""


class _Made(CannotCutSequence):
    """An operation meets what the model's code made for the positions that it sees."""

    def __init__(self, reason: str, op: int) -> None:
        super().__init__(reason)
        self.op = op


def context_plan(trace: Trace, *, by_position: Collection[str] = ()) -> ContextPlan:
    """Raises CannotCutSequence, with the module and the reason, where the model mixes positions outside attention.
    `by_position`: modules known to treat positions one by one, whatever their code looks like (experts)."""
    graph = Graph(trace)
    written = _written(graph)
    while True:
        try:
            return _plan(graph, written, by_position)
        except _Made as refusal:
            # Masks and tables that the code makes for attention come out right where it has the full sequence.
            more = _holder_of(graph, refusal.op, written)
            if more is None:
                raise
            written = sorted([*written, *more], key=lambda call: call.first)


def _plan(graph: Graph, written: list[Call], by_position: Collection[str]) -> ContextPlan:
    trace = graph.trace
    inside = {attention.module for attention in trace.attention} | {call.path for call in written}
    calls = [c for c in _block_calls(trace) if any(_within(c, m) for m in inside)]
    if not inside:
        raise CannotCutSequence(_no_attention(trace))
    outside = next((m for m in inside if not any(_within(call, m) for call in calls)), None)
    if outside is not None:
        raise CannotCutSequence(f"{named(trace.model, outside)} attends outside the blocks")
    repeated = next((call.path for call in calls if len(trace.calls_of(call.path)) > 1), None)
    if repeated is not None:
        raise CannotCutSequence(f"{repeated} runs several times, so its ends are not those of the blocks")
    stream, leaf = _stream(trace, calls[0])
    shape = trace.values[stream].shape
    beside = [n for n in graph.users.get(stream, ()) if n >= calls[0].stop and graph.live[n]]
    if beside:
        where = named(trace.model, trace.ops[beside[0]].module)
        raise CannotCutSequence(f"what {calls[0].path} is given is used beside it, by {where}, for all positions")
    dim = _sequence_dim(trace, stream)
    closed = [call for call in trace.calls if call.path in by_position]
    torn = next((c.path for c in written for e in closed if c.first <= e.first and e.stop <= c.stop), None)
    if torn is not None:
        raise CannotCutSequence(f"{torn} holds attention written out and experts in one module; make them two modules")
    follower = _Follower(graph, calls, closed, written)
    masks = _through_blocks(follower, stream, Cut(dim, (shape[dim],)))
    batch, why = _to_the_loss(graph, calls[-1], follower.cuts)
    if batch is None:
        _require_one_stream(graph, calls[-1], follower.cuts, why)
    return ContextPlan(
        length=shape[dim], dim=dim, blocks=tuple(call.path for call in calls), stream=leaf,
        extras=follower.extras, masks=masks, causal=any(a.causal or _has_rows(graph, a) for a in trace.attention),
        batch=batch, why_whole=why, holders=_holder_plans(follower, shape[dim]),
    )  # fmt: skip


def _has_rows(graph: Graph, attention: Attention) -> bool:
    """Whether its mask differs from position to position, as a causal one does; one that hides padding does not."""
    return attention.mask is not None and graph.values[attention.mask].shape[-2] > 1


def named(model: nn.Module, path: str) -> str:
    """A module as a message names it; the root has no path."""
    return path or f"the model itself (class {type(model).__name__})"


def _block_calls(trace: Trace) -> list[Call]:
    paths = {path for path, _ in blocks(trace.model)}
    return [call for call in trace.calls if call.path in paths]


def _sequence_dim(trace: Trace, stream: int) -> int:
    return 1 if trace.values[stream].shape[0] == trace.samples else 0


def _written(graph: Graph) -> list[Call]:
    """The calls that hold attention written out, in the blocks."""
    found: list[Call] = []
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


def _holder_of(graph: Graph, op: int, written: list[Call]) -> list[Call] | None:
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


def _within(call: Call, module: str) -> bool:
    return module == call.path or module.startswith(call.path + ".")


def _stream(trace: Trace, call: Call) -> tuple[int, int]:
    for leaf, value in enumerate(call.arguments):
        if value is not None and trace.values[value].learned and len(trace.values[value].shape) == 3:
            return value, leaf
    raise CannotCutSequence(f"{call.path} is given no sequence of vectors (samples, positions, features)")


def _through_blocks(follower: _Follower, stream: int, cut: Cut) -> dict[str, tuple[int, ...]]:
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
            _hold(follower, waiting.pop(0), cut.size, first)
            continue
        value = follower.open_values.pop(0)
        for attention in attentions:
            if value == attention.query:
                _enter(follower, attention.output, follower.cuts[value], first)
        for call in follower.closed:
            if value in call.arguments and trace.values[value].learned:
                _past(follower, call, value, first)
        producer = graph.values[value].producer
        before = [producer] if first <= producer < stop else []
        users = [n for n in graph.users.get(value, ()) if first <= n < stop and graph.live[n]]
        for number in before + users:
            if number not in barred:
                _step(follower, number, value, first)
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
                raise _Made(why, attention.first)
            masks[block.path] = (*masks.get(block.path, ()), leaf)
    return masks


def _hold(follower: _Follower, call: Call, length: int, first: int) -> None:
    """What a module that holds attention gives back, from the cuts of what it is given."""
    _, results = _through_holder(follower, call, length)
    for value, cut in results.items():
        _enter(follower, value, cut, first)


def _through_holder(follower: _Follower, call: Call, length: int) -> tuple[dict[int, Cut], dict[int, Cut]]:
    """Arguments and results of a holder that are cut."""
    graph = follower.graph
    given: dict[int, Cut] = {}
    for value in call.arguments:
        cut = _given_cut(follower, call, value) if value is not None else None
        if value is not None and cut is not None:
            given[value] = cut
    ops = [op for op in graph.ops[call.first : call.stop] if graph.live[op.number]]
    try:
        walk = follow(graph, ops, given, length, attention=graph.trace.attention)
    except CannotFollow as refusal:
        raise CannotCutSequence(str(refusal)) from None
    results = {value: walk.cuts[value] for value in call.results if value is not None and value in walk.cuts}
    for value, cut in walk.cuts.items():
        if value in given or value in results:
            continue
        if any(n >= call.stop and graph.live[n] for n in graph.users.get(value, ())):
            maker = graph.ops[graph.values[value].producer]
            raise CannotCutSequence(
                f"a result of {maker.name} in {maker.module}, cut along dimension {cut.dim}, is used behind "
                f"{call.path}, which does not give it back"
            )
    return given, results


def _given_cut(follower: _Follower, call: Call, value: int) -> Cut | None:
    """How an argument of a holder is cut, be it because the block's own argument is."""
    if value in follower.cuts:
        return follower.cuts[value]
    block = follower.call_at(call.first)
    if block is None or call is block:
        dims = follower.extras.get(call.path, {})
        leaf = call.arguments.index(value)
        return Cut(dims[leaf], (follower.graph.values[value].shape[dims[leaf]],)) if leaf in dims else None
    leaf_behind = _argument_behind(follower.graph, block, value)
    dim = follower.extras.get(block.path, {}).get(leaf_behind) if leaf_behind is not None else None
    if dim is None or leaf_behind is None:
        return None
    source = block.arguments[leaf_behind]
    assert source is not None
    shape = follower.graph.values[value].shape
    at = dim + len(shape) - len(follower.graph.values[source].shape)
    return Cut(at, (shape[at],))


def _holder_plans(follower: _Follower, length: int) -> dict[str, Holder]:
    found: dict[str, Holder] = {}
    for call in follower.holders:
        given, results = _through_holder(follower, call, length)
        irregular = next((v for v, cut in {**given, **results}.items() if not is_regular(cut, length)), None)
        if irregular is not None:
            shape = list(follower.graph.values[irregular].shape)
            raise CannotCutSequence(f"{call.path} is given or gives back {shape}, in which positions are no dimension")
        holder = Holder(
            arguments={n: _places(given[v], length) for n, v in enumerate(call.arguments) if v in given},
            results={n: _places(results[v], length) for n, v in enumerate(call.results) if v in results},
        )
        if found.setdefault(call.path, holder) != holder:
            raise CannotCutSequence(f"{call.path} is called in two ways, with other arguments cut")
    return found


def _places(cut: Cut, length: int) -> Places:
    return cut.dim, factors(cut, length)[1]


def _past(follower: _Follower, call: Call, value: int, first: int) -> None:
    """What a call that is not looked into gives back for each position is cut as what it is given."""
    graph, cut = follower.graph, follower.cuts[value]
    given = graph.values[value].shape
    for result in call.results:
        if result is None or result == value or not graph.values[result].learned:
            continue
        if graph.values[result].shape[: cut.dim + 1] == given[: cut.dim + 1]:
            _enter(follower, result, cut, first)
        elif any(number >= call.stop and graph.live[number] for number in graph.users.get(result, ())):
            shape = list(graph.values[result].shape)
            raise CannotCutSequence(f"{call.path} gives back {shape} for all positions together")


def _argument_behind(graph: Graph, call: Call, value: int) -> int | None:
    """The block's argument that a value is, looked at through views of it."""
    while value not in call.arguments:
        producer = graph.values[value].producer
        if producer < call.first or graph.ops[producer].name not in VIEWS:
            return None
        value = graph.ops[producer].inputs[0]
    return call.arguments.index(value)


def _mask_argument(graph: Graph, call: Call, mask: int) -> int | None:
    """The block's argument that a mask is. Rows are cut where the argument has them, so the code between may neither
    make them nor choose among them."""
    leaf = _argument_behind(graph, call, mask)
    source = call.arguments[leaf] if leaf is not None else None
    if source is None or graph.values[source].shape[-2:] != graph.values[mask].shape[-2:]:
        return None
    while mask != source:
        op = graph.ops[graph.values[mask].producer]
        if op.name == "slice":
            return None
        mask = op.inputs[0]
    return leaf


def _step(follower: _Follower, number: int, value: int, first: int) -> None:
    graph = follower.graph
    op = graph.ops[number]
    where = f"{op.module or 'the model'} ({op.name})"
    try:
        others, sums = graph.follow(op, value, follower.cuts[value], follower.cuts)
    except Refuted as refusal:
        raise CannotCutSequence(f"{where} mixes positions: {refusal}") from None
    except NeedsSegments:
        raise CannotCutSequence(f"{where} takes the sequence apart") from None
    if sums:
        raise CannotCutSequence(f"{where} sums over positions")
    for other, found in others.items():
        if other in follower.cuts:
            if follower.cuts[other] != found:
                raise CannotCutSequence(f"{where} mixes positions")
            continue
        made = graph.values[other]
        if made.producer < first:
            call = follower.call_at(number)
            leaf = _argument_behind(graph, call, other) if call is not None else None
            if call is None or leaf is None or made.learned:
                what = made.name or f"a tensor of {list(made.shape)}"
                raise _Made(f"{where} meets {what}, which is there for all positions and is no argument", number)
            follower.extras.setdefault(call.path, {})[leaf] = found.dim
            continue
        _enter(follower, other, found, first, at=number)


def _enter(follower: _Follower, value: int, cut: Cut, first: int, *, at: int = -1) -> None:
    if value in follower.cuts:
        return
    made = follower.graph.values[value]
    depends = made.learned or any(v in follower.cuts for v in _sources(follower.graph, value))
    if made.source != "op" or not (depends or follower.graph.ops[made.producer].inputs):
        maker = follower.graph.ops[made.producer].module if made.producer >= 0 else ""
        where = named(follower.graph.trace.model, maker)
        raise _Made(f"{where} makes a tensor for the positions that it sees, of {list(made.shape)}", at)
    follower.cuts[value] = cut
    follower.open_values.append(value)


def _sources(graph: Graph, value: int) -> tuple[int, ...]:
    producer = graph.values[value].producer
    return graph.ops[producer].inputs if producer >= 0 else ()


def _to_the_loss(graph: Graph, last: Call, cuts: Mapping[int, Cut]) -> tuple[dict[str, int] | None, str]:
    """Which entries of the batch the loss reads position by position, or None and why it cannot."""
    trace = graph.trace
    result = next((v for v in last.results if v is not None and v in cuts), None)
    if result is None:
        return None, f"{last.path} gives back no cut sequence"
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
    return batch, ""


def _used_behind(graph: Graph, last: Call, cuts: Mapping[int, Cut], *, stream: int | None) -> list[int]:
    """Cut values beside the stream that are read behind the last block."""
    behind = [v for v in cuts if any(n >= last.stop and graph.live[n] for n in graph.users.get(v, ()))]
    return [value for value in behind if value != stream]


def _require_one_stream(graph: Graph, last: Call, cuts: Mapping[int, Cut], why: str) -> None:
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
        return {op.inputs[1]: Cut(cut.dim if cut.dim == 0 else cut.dim - 1, cut.segments)}, True
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
