"""Modules that hold attention and run as if they had the full sequence: what they are given and give back of it."""

from __future__ import annotations

from shoal.layout.context.follower import Follower, argument_behind, enter
from shoal.layout.context.plan import CannotCutSequence, Holder, Places
from shoal.layout.cuts import Cut
from shoal.layout.global_view import CannotFollow, factors, follow, is_regular
from shoal.layout.recorded import Call


def hold(follower: Follower, call: Call, length: int, first: int) -> None:
    """What a module that holds attention gives back, from the cuts of what it is given."""
    _, results = _through_holder(follower, call, length)
    for value, cut in results.items():
        enter(follower, value, cut, first)


def _through_holder(follower: Follower, call: Call, length: int) -> tuple[dict[int, Cut], dict[int, Cut]]:
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


def _given_cut(follower: Follower, call: Call, value: int) -> Cut | None:
    """How an argument of a holder is cut, be it because the block's own argument is."""
    if value in follower.cuts:
        return follower.cuts[value]
    block = follower.call_at(call.first)
    if block is None or call is block:
        dims = follower.extras.get(call.path, {})
        leaf = call.arguments.index(value)
        return Cut(dims[leaf], (follower.graph.values[value].shape[dims[leaf]],)) if leaf in dims else None
    leaf_behind = argument_behind(follower.graph, block, value)
    dim = follower.extras.get(block.path, {}).get(leaf_behind) if leaf_behind is not None else None
    if dim is None or leaf_behind is None:
        return None
    source = block.arguments[leaf_behind]
    assert source is not None
    shape = follower.graph.values[value].shape
    at = dim + len(shape) - len(follower.graph.values[source].shape)
    return Cut(at, (shape[at],))


def holder_plans(follower: Follower, length: int) -> dict[str, Holder]:
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
