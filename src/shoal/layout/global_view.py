"""How operations written for a full sequence run on a rank that holds some of its positions: which operands are
sliced, which are gathered, and along which dimension results are split.

The split is propagated forwards. An operand for all positions is sliced if another operand has only some; an operand
whose split dimension is needed in full (the keys of a score product, the values of a weighted sum, a mean over
positions) is gathered. So every sequence of operations can run; only its cost differs. The exception is code that
writes in place into a gathered copy: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.layout.cuts import Cut
from shoal.layout.recorded import Op, TracedAttention
from shoal.layout.tensor.dims import bind
from shoal.layout.tensor.segments import NeedsSegments, Refuted
from shoal.layout.tensor.spread import READS_SIZES_ONLY, Graph

FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
SIZED = ("view", "_unsafe_view", "reshape", "_reshape_alias", "expand")
"""Operations whose arguments name the sizes of their result."""
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv")


class CannotFollow(ValueError):
    """An operation that cannot run on parts: it would write into a gathered copy."""


@dataclass(slots=True)
class PlacedOp:
    """One operation, and what happens to its operands before it."""

    op: Op
    gathered: dict[int, str] = field(default_factory=dict)
    """Split operand that is needed in full -> why: "pairs" (the result would have the sequence twice), "sum" (it is
    summed over), or the text of the rule."""
    sliced: dict[int, Cut] = field(default_factory=dict)
    """Operand for all positions of which this rank needs its own -> how it is sliced."""
    outputs: dict[int, Cut] = field(default_factory=dict)
    attends: bool = False
    """Whether it is attention over the sequence, which the strategy's cp method computes."""

    @property
    def is_plain(self) -> bool:
        """Whether the operation runs on parts unchanged."""
        named = self.op.name in SIZED and bool(self.outputs)
        return not (self.gathered or self.sliced or self.attends or named)


@dataclass(slots=True)
class Walk:
    """A range of operations with the splits of their values."""

    length: int
    """Positions of the full sequence."""
    cuts: dict[int, Cut]
    steps: list[PlacedOp] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    """Values that share memory with a gathered copy."""


def follow(
    graph: Graph, ops: Iterable[Op], cuts: dict[int, Cut], length: int, *, attention: Sequence[TracedAttention] = ()
) -> Walk:
    """Propagates `cuts` through the operations. `attention`: calls of `scaled_dot_product_attention` among them, each
    treated as one operation."""
    walk = Walk(length, dict(cuts))
    calls = {number: each for each in attention for number in range(each.first, each.stop)}
    for op in ops:
        call = calls.get(op.number)
        if call is not None:
            if op.number == call.first and call.query in walk.cuts:
                walk.cuts[call.output] = walk.cuts[call.query]
            continue
        step = step_of(graph, op, walk)
        walk.steps.append(step)
        walk.cuts.update(step.outputs)
    return walk


def step_of(graph: Graph, op: Op, walk: Walk) -> PlacedOp:
    """How one operation runs, given the cuts that the walk has come to."""
    step = PlacedOp(op)
    given = [value for value in dict.fromkeys(op.inputs) if value in walk.cuts]
    writes = op.overload._schema.is_mutable
    if not given:
        if writes and op.inputs[:1] and op.inputs[0] in walk.copies:
            raise CannotFollow(_where(op, "writes into positions of the sequence, in place"))
        _share(op, step, walk)
        return step
    if op.name in FUSED_ATTENTION and _attends(graph, op, step, walk):
        return step
    while True:
        kept = {value: walk.cuts[value] for value in given if value not in step.gathered}
        step.sliced, step.outputs = {}, {}
        if not kept:
            break
        found = _one_more(graph, op, kept, step, walk.length)
        if found is None:
            break
        value, why = found
        step.gathered[value] = why
    if writes:
        target = op.inputs[0]
        if target in step.sliced:
            # The target stays full, so the other operands must be full too.
            step.gathered = dict.fromkeys(given, "it is written into a tensor for all positions")
            step.sliced, step.outputs = {}, {}
        elif target in step.gathered or target in walk.copies:
            raise CannotFollow(_where(op, "writes into positions of the sequence, in place"))
    _share(op, step, walk)
    return step


def _where(op: Op, what: str) -> str:
    return f"{op.module or 'the model itself'} ({op.name}) {what}"


def _share(op: Op, step: PlacedOp, walk: Walk) -> None:
    """Notes results that are views of a gathered copy."""
    if any(value in step.gathered or value in walk.copies for value in op.inputs):
        returns = op.overload._schema.returns
        if any(result.alias_info is not None for result in returns):
            walk.copies.update(op.outputs)


def _one_more(graph: Graph, op: Op, kept: dict[int, Cut], step: PlacedOp, length: int) -> tuple[int, str] | None:
    """An operand that must be gathered, and why; None if the operation runs on the parts."""
    for value, cut in kept.items():
        try:
            others, sums = graph.follow(op, value, cut, kept)
        except Refuted as refusal:
            return value, str(refusal)
        except NeedsSegments:
            return value, "it takes the sequence apart"
        if sums:
            return value, "sum"
        for other, found in others.items():
            if not is_regular(found, length):
                return value, "it takes the sequence apart"
            if other in op.outputs:
                if step.outputs.setdefault(other, found) != found:
                    return value, "pairs"
            elif other in kept:
                if kept[other] != found:
                    return other, "pairs"
            elif other not in step.gathered and step.sliced.setdefault(other, found) != found:
                return value, "pairs"
            elif other in step.gathered:
                # It was gathered for another dimension and is sliced along this one.
                step.sliced[other] = found
        if op.outputs[0] not in others and op.name not in READS_SIZES_ONLY:
            return value, "its result is for all positions"
    return None


def _attends(graph: Graph, op: Op, step: PlacedOp, walk: Walk) -> bool:
    """Whether this is self-attention over the sequence: queries, keys and values are split along it in the same way."""
    call = bind(op, graph.values)
    read = [call.named[name].value for name in ("query", "key", "value")]
    if not all(value in walk.cuts and walk.cuts[value].dim == 2 for value in read):
        return False
    step.attends = True
    step.outputs = {op.outputs[0]: walk.cuts[read[0]]}
    return True


def is_regular(cut: Cut, length: int) -> bool:
    """Whether positions are one factor of the dimension: (outer, positions, inner), as a view leaves them."""
    first = cut.segments[0]
    return first % length == 0 and all(segment == first for segment in cut.segments)


def factors(cut: Cut, length: int) -> tuple[int, int]:
    """(outer, inner) of a regular cut: how often the sequence repeats along its dimension, and in which steps."""
    return len(cut.segments), cut.segments[0] // length
