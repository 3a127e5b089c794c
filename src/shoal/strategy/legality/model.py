"""Rules about what a model can be divided into. A rule whose fact is unknown does not apply."""

from __future__ import annotations

from math import gcd

from shoal.strategy.legality.rule import Breach, Case, RuleTable, around
from shoal.strategy.terms.axes import cp, dp, ep, pp, spatial, tp

rule = RuleTable()


def _cuttable(case: Case) -> int:
    """The greatest common divisor of all that tensor parallelism must divide; 0 if nothing is known."""
    facts = case.facts
    return gcd(facts.heads or 0, facts.kv_heads or 0, facts.hidden or 0, *(facts.channels or ()))


def _divide_tensor(case: Case, index: int, cut: tp, parts: int | None, noun: str) -> Breach | None:
    # Where the model was looked into, it is known what is cut: `tp_divides_regions`.
    if case.facts.tensor_parts is not None or parts is None or parts % cut.n == 0:
        return None
    return Breach(
        cut,
        f"{parts} {noun} do not divide by {cut.n}",
        lambda: case.resized(index, around(_cuttable(case), cut.n)),
    )


@rule(tp, why="Tensor parallelism cuts projections in pairs; a model without such pairs has nothing to cut.")
def tp_needs_projections(case: Case, index: int, cut: tp) -> Breach | None:
    if cut.n == 1 or case.facts.tensor_parts is None or case.facts.tensor_parts:
        return None
    return Breach(
        cut,
        f"nothing of the model can be cut: {case.facts.tensor_why}",
        lambda: [case.put(index, dp(cut.n)), case.put(index)],
    )


@rule(tp, why="Each rank gets the same number of heads, features or channels of every layer that is cut.")
def tp_divides_regions(case: Case, index: int, cut: tp) -> Breach | None:
    cuttable = [row for row in case.facts.tensor_parts or () if not cut.batch or row[1] == "features"]
    odd = next((row for row in cuttable if row[2] % cut.n), None)
    if odd is None:
        return None
    module, noun, parts = odd
    fitting = gcd(*(row[2] for row in cuttable))
    return Breach(
        cut,
        f"{module}: {parts} {noun} do not divide by {cut.n}",
        lambda: case.resized(index, around(fitting, cut.n)),
    )


@rule(tp, why="With sequence=True everything between cut layers must treat tokens one by one.")
def tp_sequence_needs_tokens(case: Case, index: int, cut: tp) -> Breach | None:
    if not cut.sequence or not case.facts.sequence_why:
        return None
    return Breach(
        cut,
        f"the tokens cannot be cut between layers: {case.facts.sequence_why}",
        lambda: [case.changed(index, sequence=False)],
    )


@rule(tp, why="sequence=True cuts the parts of the sequence that cp has made, so cp must cut where tp does.")
def tp_sequence_lies_within_context(case: Case, index: int, cut: tp) -> Breach | None:
    context = case.strategy.term(cp)
    why = case.facts.sequence_under_cp_why
    if not (cut.sequence and cut.n > 1 and context is not None and context.n > 1 and why):
        return None
    return Breach(
        cut,
        f"the tokens cannot be cut between layers together with cp: {why}",
        lambda: [case.changed(index, sequence=False)],
    )


@rule(tp, why="Between cut layers activations can be cut along the sequence or along the batch, not both.")
def tp_cuts_one_dimension(case: Case, index: int, cut: tp) -> Breach | None:
    if not (cut.sequence and cut.batch):
        return None
    return Breach(
        cut,
        "activations between the layers cannot be cut along the sequence and along the batch",
        lambda: [case.changed(index, batch=False), case.changed(index, sequence=False)],
    )


@rule(tp, why="With batch=True fully connected layers are cut; a model without a pair of them has nothing to cut.")
def tp_batch_needs_features(case: Case, index: int, cut: tp) -> Breach | None:
    parts = case.facts.tensor_parts
    if not cut.batch or cut.n == 1 or parts is None or any(noun == "features" for _, noun, _ in parts):
        return None
    return Breach(
        cut,
        "no pair of fully connected layers can be cut, which batch=True needs",
        lambda: [case.changed(index, batch=False), case.put(index, dp(cut.n))],
    )


@rule(cp, why="Outside attention every operation must treat positions one by one.")
def cp_needs_positions_apart(case: Case, index: int, context: cp) -> Breach | None:
    if context.n == 1 or not case.facts.context_why:
        return None
    return Breach(
        context,
        f"the sequence cannot be cut: {case.facts.context_why}",
        lambda: [case.put(index, dp(context.n)), case.put(index)],
    )


@rule(cp, why="Stages hand on what blocks are given, so the sequence must be cut from block to block.")
def cp_in_stages_needs_blocks(case: Case, index: int, context: cp) -> Breach | None:
    stages, why = case.strategy.term(pp), case.facts.context_in_stages_why
    if context.n == 1 or stages is None or stages.n == 1 or not why:
        return None
    return Breach(
        context,
        f"the sequence cannot be cut in the stages of a pipeline: {why}",
        lambda: [case.put(index, dp(context.n)), case.put(index)],
    )


@rule(tp, why="Attention heads are not cut; every rank gets the same number.")
def tp_divides_heads(case: Case, index: int, cut: tp) -> Breach | None:
    return _divide_tensor(case, index, cut, case.facts.heads, "heads")


@rule(
    tp,
    why="Heads of keys and values are not cut either, or ranks would attend to keys they do not have.",
)
def tp_divides_kv_heads(case: Case, index: int, cut: tp) -> Breach | None:
    return _divide_tensor(case, index, cut, case.facts.kv_heads, "key-value heads")


@rule(tp, why="Columns and rows of the matrices are split evenly.")
def tp_divides_hidden(case: Case, index: int, cut: tp) -> Breach | None:
    return _divide_tensor(case, index, cut, case.facts.hidden, "hidden units")


@rule(tp, why="Filters of a convolution are not cut; every rank gets the same number.")
def tp_divides_channels(case: Case, index: int, cut: tp) -> Breach | None:
    odd = next((channels for channels in case.facts.channels or () if channels % cut.n), None)
    return _divide_tensor(case, index, cut, odd, "channels")


@rule(tp, why="With sequence=True the same ranks also cut the sequence between the layers, evenly.")
def tp_sequence_divides_tokens(case: Case, index: int, cut: tp) -> Breach | None:
    context = case.strategy.term(cp)
    tokens, parts = case.facts.sequence, cut.n * (context.n if context else 1)
    if not cut.sequence or tokens is None or tokens % parts == 0:
        return None
    return Breach(
        cut,
        f"a sequence of {tokens} tokens does not divide by {parts}, as sequence=True needs",
        lambda: [case.changed(index, sequence=False), *case.resized(index, around(tokens, cut.n))],
    )


@rule(
    cp,
    why="Ranks hold equal parts of the sequence; a causal ring pairs an early with a late part, so it "
    "needs two per rank.",
)
def cp_divides_tokens(case: Case, index: int, context: cp) -> Breach | None:
    tokens = case.facts.sequence
    parts = context.n * (2 if context.method == "ring" and context.n > 1 else 1)
    if tokens is None or tokens % parts == 0:
        return None
    paired = " (two parts per rank, so that causal work is even)" if parts > context.n else ""
    divisible = tokens // 2 if context.method == "ring" and tokens % 2 == 0 else tokens
    return Breach(
        context,
        f"a sequence of {tokens} tokens does not divide by {parts}{paired}",
        lambda: [
            *case.resized(index, around(divisible, context.n)),
            *([case.changed(index, method="ulysses")] if context.method == "ring" else []),
        ],
    )


@rule(
    cp,
    why="Ulysses gives each rank full sequences of some heads, after tensor parallelism has taken its share of them.",
)
def ulysses_divides_heads(case: Case, index: int, context: cp) -> Breach | None:
    cut = case.strategy.term(tp)
    taken = cut.n if cut else 1
    names = (("heads", case.facts.heads), ("key-value heads", case.facts.kv_heads))
    odd = next(((noun, heads) for noun, heads in names if heads is not None and heads % (context.n * taken)), None)
    if context.method != "ulysses" or odd is None:
        return None
    split = f"{context.n} x tp {taken}" if taken > 1 else str(context.n)
    heads = gcd(case.facts.heads or 0, case.facts.kv_heads or 0)
    fitting = around(heads // taken, context.n) if heads % taken == 0 else [1]
    return Breach(
        context,
        f"{odd[1]} {odd[0]} do not divide by {split}",
        lambda: [*case.resized(index, fitting), case.changed(index, method="ring")],
    )


@rule(cp, why="Context parallelism cuts the sequence that attention runs over.")
def cp_needs_a_sequence(case: Case, index: int, context: cp) -> Breach | None:
    facts = case.facts
    if facts.image is None or facts.sequence is not None or facts.heads is not None:
        return None
    return Breach(
        context,
        f"the model reads images of {facts.image[0]} x {facts.image[1]} and has no sequence to cut",
        lambda: [case.put(index, spatial(context.n)), case.put(index)],
    )


@rule(ep, why="Expert parallelism splits experts among ranks.")
def ep_needs_experts(case: Case, index: int, experts: ep) -> Breach | None:
    if case.facts.experts != 0:
        return None
    return Breach(
        experts,
        "the model has no experts to split" + (f": {case.facts.experts_why}" if case.facts.experts_why else ""),
        lambda: [case.put(index, dp(experts.n)), case.put(index)],
    )


@rule(ep, why="Every rank gets the same number of experts.")
def ep_divides_experts(case: Case, index: int, experts: ep) -> Breach | None:
    there = case.facts.experts
    if not there or there % experts.n == 0:
        return None
    return Breach(
        experts,
        f"{there} experts do not divide by {experts.n}",
        lambda: case.resized(index, around(there, experts.n)),
    )


@rule(spatial, why="Spatial parallelism cuts image planes.")
def spatial_needs_images(case: Case, index: int, planes: spatial) -> Breach | None:
    if case.facts.image is not None or case.facts.sequence is None:
        return None
    return Breach(
        planes,
        f"the model reads sequences of {case.facts.sequence} tokens and has no image planes to cut",
        lambda: [case.put(index, cp(planes.n)), case.put(index)],
    )


@rule(spatial, why="Each rank along a side gets at least one row or column of the image.")
def spatial_fits_images(case: Case, index: int, planes: spatial) -> Breach | None:
    if case.facts.image is None:
        return None
    (height, width), (rows, columns) = case.facts.image, planes.grid
    if height >= rows and width >= columns:
        return None
    side, length, parts = ("height", height, rows) if height < rows else ("width", width, columns)
    most = {"height": height, "width": width, "both": min(height, width) ** 2}[planes.split]
    return Breach(
        planes,
        f"an image {side} of {length} cannot be cut among {parts} ranks",
        lambda: [
            *case.resized(index, [n for n in range(min(most, planes.n), 0, -1) if planes.of(n).fits(height, width)]),
            *[case.changed(index, split=split) for split in ("height", "width", "both") if split != planes.split],
        ],
    )


@rule(spatial, why="Sequences and tokens of experts are followed by other rules than planes.")
def spatial_cuts_alone(case: Case, index: int, planes: spatial) -> Breach | None:
    other = next((term for cls in (cp, ep) if (term := case.strategy.term(cls)) is not None and term.n > 1), None)
    if planes.n == 1 or other is None:
        return None
    return Breach(
        planes,
        f"planes cannot be cut together with {type(other).__name__}; dp, pp and tp can be combined with spatial",
        lambda: [case.put(index, dp(planes.n)), case.put(index)],
    )


@rule(spatial, why="What convolutions and poolings compute is cut; a model without planes has nothing to cut.")
def spatial_needs_planes(case: Case, index: int, planes: spatial) -> Breach | None:
    if planes.n == 1 or not case.facts.spatial_why:
        return None
    return Breach(
        planes,
        f"image planes cannot be cut: {case.facts.spatial_why}",
        lambda: [case.put(index, dp(planes.n)), case.put(index)],
    )
