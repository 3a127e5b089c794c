"""One step of following a cut sequence through the blocks: an operation, an argument, a call not looked into."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.layout.context.plan import CannotCutSequence, Leaves, Made, named
from shoal.layout.cuts import Cut
from shoal.layout.recorded import Attention, Call
from shoal.layout.tensor.segments import NeedsSegments, Refuted
from shoal.layout.tensor.spread import Graph

VIEWS = ("expand", "slice", "view", "unsqueeze", "_to_copy")


@dataclass
class Follower:
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


def argument_behind(graph: Graph, call: Call, value: int) -> int | None:
    """The block's argument that a value is, looked at through views of it."""
    while value not in call.arguments:
        producer = graph.values[value].producer
        if producer < call.first or graph.ops[producer].name not in VIEWS:
            return None
        value = graph.ops[producer].inputs[0]
    return call.arguments.index(value)


def step(follower: Follower, number: int, value: int, first: int) -> None:
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
            leaf = argument_behind(graph, call, other) if call is not None else None
            if call is None or leaf is None or made.learned:
                what = made.name or f"a tensor of {list(made.shape)}"
                raise Made(f"{where} meets {what}, which is there for all positions and is no argument", number)
            follower.extras.setdefault(call.path, {})[leaf] = found.dim
            continue
        enter(follower, other, found, first, at=number)


def enter(follower: Follower, value: int, cut: Cut, first: int, *, at: int = -1) -> None:
    if value in follower.cuts:
        return
    made = follower.graph.values[value]
    depends = made.learned or any(v in follower.cuts for v in _sources(follower.graph, value))
    if made.source != "op" or not (depends or follower.graph.ops[made.producer].inputs):
        maker = follower.graph.ops[made.producer].module if made.producer >= 0 else ""
        where = named(follower.graph.trace.model, maker)
        raise Made(f"{where} makes a tensor for the positions that it sees, of {list(made.shape)}", at)
    follower.cuts[value] = cut
    follower.open_values.append(value)


def _sources(graph: Graph, value: int) -> tuple[int, ...]:
    producer = graph.values[value].producer
    return graph.ops[producer].inputs if producer >= 0 else ()


def past(follower: Follower, call: Call, value: int, first: int) -> None:
    """What a call that is not looked into gives back for each position is cut as what it is given."""
    graph, cut = follower.graph, follower.cuts[value]
    given = graph.values[value].shape
    for result in call.results:
        if result is None or result == value or not graph.values[result].learned:
            continue
        if graph.values[result].shape[: cut.dim + 1] == given[: cut.dim + 1]:
            enter(follower, result, cut, first)
        elif any(number >= call.stop and graph.live[number] for number in graph.users.get(result, ())):
            shape = list(graph.values[result].shape)
            raise CannotCutSequence(f"{call.path} gives back {shape} for all positions together")
