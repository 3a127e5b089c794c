"""Rules about pipelines: what a schedule needs, and what it cannot be combined with."""

from __future__ import annotations

from shoal.strategy.legality.rule import Breach, Case, RuleTable
from shoal.strategy.terms.axes import dp, pp
from shoal.strategy.terms.modifiers import accumulate, recompute
from shoal.strategy.terms.numerals import counted

rule = RuleTable()


@rule(
    accumulate,
    pp,
    why="A pipeline accumulates over its micro-batches already; a second count of them would contradict the first.",
)
def a_pipeline_accumulates_already(case: Case, index: int, accumulation: accumulate) -> Breach | None:
    place, pipeline = next(case.places(pp))
    terms = list(case.strategy.terms)
    terms[place] = pipeline.replace(micro=min(pipeline.micro * accumulation.k, 10**9))
    without = [term for term in terms if term is not accumulation]
    return Breach(
        accumulation,
        f"{pipeline} accumulates over its {counted(pipeline.micro, 'micro-batch', 'micro-batches')} "
        "already; with pp the count is micro",
        lambda: [case.built(*without), case.put(index)],
    )


@rule(pp, why="Interleaving means that each rank holds several pieces of the model.")
def interleaving_needs_chunks(case: Case, index: int, pipeline: pp) -> Breach | None:
    if pipeline.schedule != "interleaved" or pipeline.chunks >= 2:
        return None
    return Breach(
        pipeline,
        "an interleaved schedule needs at least two chunks of the model on each rank",
        lambda: [case.changed(index, chunks=2), case.changed(index, schedule="1f1b")],
    )


@rule(pp, why="Other schedules run one piece of the model on each rank.")
def chunks_need_interleaving(case: Case, index: int, pipeline: pp) -> Breach | None:
    if pipeline.chunks == 1 or pipeline.schedule in ("interleaved", "zero-bubble"):
        return None
    return Breach(
        pipeline,
        f"{pipeline.schedule} runs one chunk of the model on each rank, not {pipeline.chunks}",
        lambda: [case.changed(index, chunks=1), case.changed(index, schedule="interleaved")],
    )


@rule(pp, why="An interleaved schedule sends micro-batches in rounds of as many as there are ranks.")
def interleaving_goes_in_rounds(case: Case, index: int, pipeline: pp) -> Breach | None:
    if pipeline.schedule != "interleaved" or pipeline.micro % pipeline.n == 0:
        return None
    below = pipeline.micro - pipeline.micro % pipeline.n
    rounds = [micro for micro in (below, below + pipeline.n) if 1 <= micro <= 10**9]
    return Breach(
        pipeline,
        f"{counted(pipeline.micro, 'micro-batch', 'micro-batches')} do not make full rounds of {pipeline.n}",
        lambda: [case.changed(index, micro=micro) for micro in rounds],
    )


@rule(
    pp,
    recompute,
    why="A split backward pass recomputes activations for each of its halves, three to five times as often "
    "as it saves.",
)
def zero_bubble_keeps_activations(case: Case, index: int, pipeline: pp) -> Breach | None:
    if pipeline.schedule != "zero-bubble":
        return None
    place = next(case.places(recompute))[0]
    plain = "interleaved" if pipeline.chunks > 1 else "1f1b"
    return Breach(
        pipeline,
        "its split backward pass would recompute activations again and again; use one or the other",
        lambda: [case.put(place), case.changed(index, schedule=plain)],
    )


@rule(
    pp,
    dp,
    why="PipeDream keeps several full versions of a stage's weights, and a sharded stage has no full version to keep.",
)
def stashed_weights_stay_whole(case: Case, index: int, pipeline: pp) -> Breach | None:
    sharded = [(place, level) for place, level in case.levels() if level.zero]
    if pipeline.schedule != "pipedream" or not sharded:
        return None
    place, level = sharded[0]
    return Breach(
        pipeline,
        f"pipedream stashes full weights for every micro-batch in flight, and {level} splits what belongs to them",
        lambda: [case.changed(place, zero=0), case.changed(index, schedule="1f1b")],
    )


@rule(
    pp,
    why="Without a flush each stage steps at its own time, so the norm of the full gradient never exists.",
)
def a_global_norm_needs_a_flush(case: Case, index: int, pipeline: pp) -> Breach | None:
    if not case.facts.clips or pipeline.schedule != "pipedream" or pipeline.n == 1:
        return None
    return Breach(
        pipeline,
        "gradients are clipped by their global norm, and pipedream has no moment at which all stages have theirs",
        lambda: [case.changed(index, schedule="1f1b")],
    )


@rule(
    pp,
    why="Without a flush the first and the last stage step at different times, so a weight they share would diverge.",
)
def tied_weights_need_a_flush(case: Case, index: int, pipeline: pp) -> Breach | None:
    if not case.facts.tied or pipeline.schedule != "pipedream" or pipeline.n == 1:
        return None
    return Breach(
        pipeline,
        "the first and the last stage share a weight, and pipedream lets them step at different times",
        lambda: [case.changed(index, schedule="1f1b")],
    )


@rule(pp, why="With a flush the weights do not change between forward and backward: there is nothing to predict.")
def prediction_needs_staleness(case: Case, index: int, pipeline: pp) -> Breach | None:
    if not pipeline.predict or pipeline.schedule == "pipedream":
        return None
    return Breach(
        pipeline,
        f"{pipeline.schedule} updates after the last backward pass, so there are no later weights to predict",
        lambda: [case.changed(index, predict=False), case.changed(index, schedule="pipedream", chunks=1)],
    )


@rule(pp, why="Every stage needs at least one layer.")
def stages_hold_layers(case: Case, index: int, pipeline: pp) -> Breach | None:
    layers, stages = case.facts.layers, pipeline.n * pipeline.chunks
    if layers is None or layers >= stages:
        return None
    return Breach(
        pipeline,
        f"{counted(layers, 'layer')} cannot fill {counted(stages, 'stage')}"
        + (f": {case.facts.layers_why}" if case.facts.layers_why else ""),
        lambda: [
            *case.resized(index, [layers // pipeline.chunks]),
            *case.resized(index, [layers // pipeline.n] if pipeline.chunks > 1 else [], "chunks"),
            *([case.put(index)] if layers < 1 else []),
        ],
    )
