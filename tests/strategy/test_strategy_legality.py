"""Every rule refuses what it should, passes what is next to it, and every alternative proposed is legal."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.common.numbers import divisors
from shoal.strategy import (
    RULES,
    IllegalStrategy,
    ModelFacts,
    Strategy,
    check,
    dp,
    is_legal,
    parse,
    require_legal,
    serial,
    tp,
)
from shoal.strategy.legality.rule import around
from strategy.strategies import legal_strategies, strategies


class Sample(NamedTuple):
    refused: str
    passed: str
    facts: ModelFacts | None = None
    passed_facts: ModelFacts | None = None
    world: int | None = None


GPT = ModelFacts(layers=12, heads=16, kv_heads=8, hidden=1024, sequence=512, experts=8, global_batch=64)
VGG = ModelFacts(channels=(64, 128, 512), image=(224, 112), experts=0)

LAYERWISE = ModelFacts(elementwise_optimizer=False)
COUPLED = ModelFacts(elementwise_optimizer=False, coupled_optimizer=True, optimizer="LBFGS")
FOUR_HEADS = (("attention.query", "heads", 4),)

SAMPLES: dict[str, list[Sample]] = {
    "loose-levels-lie-outside": [
        Sample("dp(2) * dp(2, sync=diloco(5))", "dp(2, sync=diloco(5)) * dp(2)"),
        Sample("dp(2) * pp(2) * dp(2, sync=asp())", "dp(2, sync=asp()) * pp(2) * dp(2)"),
    ],
    "fragments-have-steps-of-their-own": [
        Sample("dp(2, sync=diloco(3, fragments=4))", "dp(2, sync=diloco(4, fragments=4))"),
    ],
    "rounds-do-not-overtake": [Sample("dp(2, sync=diloco(3, overlap=3))", "dp(2, sync=diloco(3, overlap=2))")],
    "eager-rounds-are-late-already": [
        Sample("dp(2, sync=diloco(3, overlap=1, eager=True))", "dp(2, sync=diloco(3, eager=True))"),
    ],
    "compressed-rounds-are-not-late": [
        Sample("dp(2, sync=diloco(3, eager=True), compress=topk(0.1))", "dp(2, sync=diloco(3), compress=topk(0.1))"),
        Sample('dp(2, sync=diloco(3, merge="radial"), compress=topk(0.1))', 'dp(2, sync=diloco(3, merge="radial"))'),
    ],
    "resets-come-with-full-rounds": [
        Sample('dp(2, sync=diloco(4, fragments=2, state="reset"))', 'dp(2, sync=diloco(4, state="reset"))'),
        Sample('dp(2, sync=local(4, state="averaged", m=6))', 'dp(2, sync=local(4, state="averaged", m=4))'),
        Sample("dp(2, sync=local(4, v=8))", 'dp(2, sync=local(4, v=8, state="averaged"))'),
    ],
    "quorums-can-be-reached": [Sample("dp(2, sync=diloco(4, quorum=3))", "dp(2, sync=diloco(4, quorum=2))")],
    "quorums-merge-plain-moves": [
        Sample("dp(2, sync=diloco(4, quorum=2, eager=True))", "dp(2, sync=diloco(4, quorum=2))"),
        Sample('dp(2, sync=diloco(4, quorum=2, state="reset"))', "dp(2, sync=diloco(4, quorum=2))"),
        Sample("dp(2, sync=diloco(4, quorum=2), compress=topk(0.1))", "dp(2, sync=diloco(4, quorum=2))"),
    ],
    "a-synchronous-start-is-dense": [
        Sample("dp(2, sync=local(3, start=2), compress=topk(0.1))", "dp(2, sync=local(3, start=2))"),
        Sample("dp(2, sync=local(3, start=2)) * dp(2, compress=topk(0.1))", "dp(2, sync=local(3, start=2)) * dp(2)"),
    ],
    "shards-step-together": [Sample("dp(4, zero=1, sync=local(4))", "dp(4, sync=local(4)) * dp(2, zero=1)")],
    "shards-need-allreduce": [Sample("dp(4, zero=2, via=ps(1))", "dp(4, zero=0, via=ps(1))")],
    "one-level-shards": [Sample("dp(2, zero=1) * dp(2, zero=3)", "dp(2) * dp(2, zero=3)")],
    "shards-need-every-owner": [Sample("dp(4, zero=1, sync=bsp(backup=1))", "dp(4, sync=bsp(backup=1))")],
    "backups-leave-a-worker": [Sample("dp(2, sync=bsp(backup=2))", "dp(2, sync=bsp(backup=1))")],
    "backups-miss-batch-statistics": [
        Sample("dp(4, sync=bsp(backup=1))", "dp(4)", ModelFacts(batch_norm="sync"), ModelFacts(batch_norm="sync")),
        Sample(
            "dp(4, sync=bsp(backup=1))",
            "dp(4, sync=bsp(backup=1))",
            ModelFacts(batch_norm="sync"),
            ModelFacts(batch_norm="local"),
        ),
    ],
    "softsync-waits-for-one": [Sample("dp(4, sync=softsync(5))", "dp(4, sync=softsync(4))")],
    "a-torus-has-two-sides": [Sample('dp(7, sync=gossip("torus"))', 'dp(8, sync=gossip("torus"))')],
    "async-gossip-needs-a-bipartite-graph": [
        Sample('dp(5, sync=gossip("ring", "async"))', 'dp(6, sync=gossip("ring", "async"))'),
        Sample('dp(8, sync=gossip("exponential", "async"))', 'dp(8, sync=gossip("exponential", "push-sum"))'),
        Sample('dp(12, sync=gossip("torus", "async"))', 'dp(16, sync=gossip("torus", "async"))'),
    ],
    "a-centre-stays-between-its-replicas": [
        Sample("dp(4, sync=elastic(8, 0.3))", "dp(4, sync=elastic(8, 0.25))"),
        Sample("dp(2, sync=elastic(8, 0.6))", 'dp(2, sync=elastic(8, 0.6, "async"))'),
    ],
    "outer-momentum-is-synchronous": [
        Sample('dp(4, sync=gossip("random", "push-sum", momentum=0.5))', 'dp(4, sync=gossip("random", momentum=0.5))'),
        Sample('dp(4, sync=gossip("ring", "async", lr=0.7))', 'dp(4, sync=gossip("ring", "async"))'),
    ],
    "gossip-members-agree": [
        Sample('dp(4, sync=gossip("ring")) * dp(2, sync=local(4))', 'dp(4, sync=gossip("ring")) * dp(2)')
    ],
    "periods-nest": [
        Sample("dp(2, sync=diloco(50)) * dp(2, sync=local(20))", "dp(2, sync=diloco(50)) * dp(2, sync=local(25))")
    ],
    "ensembles-stand-outside": [Sample("dp(2) * ensemble(2)", "ensemble(2) * dp(2)")],
    "distillation-needs-teachers": [Sample("ensemble(1, distill=True)", "ensemble(2, distill=True)")],
    "fp16-skips-together": [
        Sample('dp(4, sync=asp()) * amp("fp16")', 'dp(4, sync=asp()) * amp("bf16")'),
        Sample('pp(2, "pipedream") * amp("fp16")', 'pp(2, "1f1b") * amp("fp16")'),
    ],
    "loose-replicas-need-an-owner": [Sample("dp(4, sync=ssp(3), via=allreduce())", "dp(4, sync=ssp(3))")],
    "hogwild-writes-shared-memory": [Sample("dp(4, sync=hogwild(), via=ps(1))", "dp(4, sync=hogwild())")],
    "shared-memory-holds-one-model": [Sample("dp(4, sync=local(4), via=shared())", "dp(4, sync=asp(), via=shared())")],
    "shared-memory-is-innermost": [Sample("dp(4, sync=hogwild()) * tp(2)", "tp(2) * dp(4, sync=hogwild())")],
    "shared-memory-sends-nothing": [
        Sample("dp(4, via=shared(), compress=fp16())", "dp(4, via=ps(1), compress=fp16())")
    ],
    "sparse-collectives-replace-allreduce": [
        Sample("dp(4, via=ps(1), compress=gtopk(0.01))", "dp(4, via=ps(1), compress=topk(0.01))"),
        Sample('dp(4, sync=gossip("ring"), compress=gtopk(0.01))', "dp(4, compress=gtopk(0.01))"),
    ],
    "compression-between-groups-needs-groups": [
        Sample("dp(4, compress=hitopk(0.01))", "dp(4, compress=hitopk(0.01)) * dp(2)"),
        Sample("dp(4, compress=hitopk(0.01))", 'dp(4, via=allreduce("hierarchical"), compress=hitopk(0.01))'),
    ],
    "compression-acts-once-a-step": [
        Sample(
            "dp(4, zero=2, compress=topk(0.1)) * accumulate(2)", "dp(4, zero=1, compress=topk(0.1)) * accumulate(2)"
        ),
        Sample("pp(2) * dp(4, zero=3, compress=int8())", "dp(4, zero=3, compress=int8())"),
    ],
    "gossip-sends-to-neighbours": [Sample('dp(4, sync=gossip("ring"), via=ps(1))', 'dp(4, sync=gossip("ring"))')],
    "colocated-shards-have-hosts": [
        Sample("dp(4, via=ps(2, levels=3))", "dp(2, via=ps(2)) * dp(2)"),
        Sample("dp(2, via=ps(3, colocated=True))", "dp(3, via=ps(3, colocated=True))"),
    ],
    "hierarchies-need-groups": [Sample('dp(7, via=allreduce("hierarchical"))', 'dp(8, via=allreduce("hierarchical"))')],
    "amp-needs-a-moment": [Sample('dp(4, sync=hogwild()) * amp("bf16")', 'dp(4) * amp("bf16")')],
    "shared-memory-is-host-memory": [
        Sample('dp(4, sync=hogwild()) * offload("optimizer")', 'dp(4, sync=hogwild()) * offload("activations")')
    ],
    "a-pipeline-accumulates-already": [Sample("pp(2) * accumulate(2)", "pp(2, micro=4)")],
    "interleaving-needs-chunks": [Sample('pp(2, "interleaved")', 'pp(2, "interleaved", chunks=2)')],
    "chunks-need-interleaving": [Sample('pp(2, "gpipe", chunks=2)', 'pp(2, "zero-bubble", chunks=2)')],
    "interleaving-goes-in-rounds": [
        Sample('pp(4, "interleaved", micro=6, chunks=2)', 'pp(4, "interleaved", micro=8, chunks=2)')
    ],
    "zero-bubble-keeps-activations": [
        Sample('pp(2, "zero-bubble") * recompute("full")', 'pp(2, "1f1b") * recompute("full")')
    ],
    "prediction-needs-staleness": [
        Sample('pp(2, "1f1b", predict=True)', 'pp(2, "pipedream", predict=True)'),
        Sample('pp(2, "zero-bubble", chunks=2, predict=True)', 'pp(2, "zero-bubble", chunks=2)'),
    ],
    "stashed-weights-stay-whole": [Sample('pp(2, "pipedream") * dp(2, zero=1)', 'pp(2, "pipedream") * dp(2)')],
    "a-global-norm-needs-a-flush": [
        Sample('pp(2, "pipedream")', 'pp(2, "gpipe")', ModelFacts(clips=True), ModelFacts(clips=True)),
        Sample('pp(2, "pipedream")', 'pp(2, "pipedream")', ModelFacts(clips=True), ModelFacts(clips=False)),
    ],
    "tied-weights-need-a-flush": [
        Sample('pp(2, "pipedream")', 'pp(2, "1f1b")', ModelFacts(tied=True), ModelFacts(tied=True)),
        Sample('pp(2, "pipedream")', 'pp(2, "pipedream")', ModelFacts(tied=True), ModelFacts()),
    ],
    "stages-hold-layers": [
        Sample("pp(16)", "pp(8)", GPT, GPT),
        Sample(
            'pp(4, "interleaved", chunks=4)',
            'pp(4, "interleaved", chunks=3)',
            ModelFacts(layers=12),
            ModelFacts(layers=12),
        ),
    ],
    "tp-needs-projections": [Sample("tp(2)", "dp(2)", ModelFacts(tensor_parts=()), ModelFacts(tensor_parts=()))],
    "tp-divides-regions": [
        Sample("tp(3)", "tp(4)", ModelFacts(tensor_parts=FOUR_HEADS), ModelFacts(tensor_parts=FOUR_HEADS)),
    ],
    "tp-sequence-needs-tokens": [
        Sample(
            "tp(2, sequence=True)",
            "tp(2)",
            ModelFacts(sequence_why="it sums over tokens"),
            ModelFacts(sequence_why="it sums over tokens"),
        ),
    ],
    "tp-sequence-lies-within-context": [
        Sample(
            "cp(2) * tp(2, sequence=True)",
            "cp(2) * tp(2)",
            ModelFacts(sequence_under_cp_why="tp begins before cp"),
            ModelFacts(sequence_under_cp_why="tp begins before cp"),
        ),
    ],
    "tp-cuts-one-dimension": [Sample("tp(2, sequence=True, batch=True)", "tp(2, batch=True)")],
    "tp-batch-needs-features": [
        Sample("tp(2, batch=True)", "tp(2)", ModelFacts(tensor_parts=FOUR_HEADS), ModelFacts(tensor_parts=FOUR_HEADS)),
    ],
    "cut-layers-need-optimizers-that-do-not-couple": [
        Sample("tp(2)", "dp(2)", COUPLED, COUPLED),
        Sample("tp(2)", "tp(2)", COUPLED, LAYERWISE),
    ],
    "stages-need-optimizers-that-do-not-couple": [
        Sample("pp(2)", "dp(2)", COUPLED, COUPLED),
        Sample("pp(2)", "pp(2)", COUPLED, LAYERWISE),
    ],
    "split-experts-need-optimizers-that-do-not-couple": [
        Sample("ep(2)", "dp(2)", COUPLED, COUPLED),
        Sample("ep(2)", "ep(2)", COUPLED, LAYERWISE),
    ],
    "cp-needs-positions-apart": [
        Sample("cp(2)", "dp(2)", ModelFacts(context_why="no attention"), ModelFacts(context_why="no attention")),
    ],
    "cp-in-stages-needs-blocks": [
        Sample(
            "pp(2) * cp(2)",
            "cp(4)",
            ModelFacts(context_in_stages_why="the model adds to the sequence itself"),
            ModelFacts(context_in_stages_why="the model adds to the sequence itself"),
        ),
    ],
    "tp-divides-heads": [Sample("tp(3)", "tp(4)", ModelFacts(heads=16), ModelFacts(heads=16))],
    "tp-divides-kv-heads": [Sample("tp(16)", "tp(8)", GPT, GPT)],
    "tp-divides-hidden": [Sample("tp(3)", "tp(4)", ModelFacts(hidden=1024), ModelFacts(hidden=1024))],
    "tp-divides-channels": [Sample("tp(128)", "tp(64)", VGG, VGG)],
    "tp-sequence-divides-tokens": [
        Sample("tp(3, sequence=True)", "tp(3)", ModelFacts(sequence=512), ModelFacts(sequence=512)),
        Sample(
            "cp(4) * tp(4, sequence=True)",
            "cp(4) * tp(2, sequence=True)",
            ModelFacts(sequence=8),
            ModelFacts(sequence=8),
        ),
    ],
    "cp-divides-tokens": [
        Sample("cp(3)", "cp(4)", GPT, GPT),
        Sample("cp(4)", 'cp(4, "ulysses")', ModelFacts(sequence=12), ModelFacts(sequence=12)),
    ],
    "ulysses-divides-heads": [
        Sample('cp(16, "ulysses")', 'cp(8, "ulysses")', GPT, GPT),
        Sample('tp(2) * cp(8, "ulysses")', 'tp(2) * cp(4, "ulysses")', GPT, GPT),
    ],
    "cp-needs-a-sequence": [
        Sample("cp(2)", "cp(2)", VGG, ModelFacts(image=(224, 224), heads=12)),
    ],
    "ep-needs-experts": [Sample("ep(2)", "ep(2)", ModelFacts(experts=0), ModelFacts(experts=None))],
    "ep-divides-experts": [Sample("ep(3)", "ep(4)", ModelFacts(experts=8), ModelFacts(experts=8))],
    "spatial-needs-images": [Sample("spatial(2)", "spatial(2)", GPT, VGG)],
    "spatial-fits-images": [
        Sample("spatial(225)", "spatial(224)", VGG, ModelFacts(image=(225, 225))),
        Sample('spatial(8, "width")', 'spatial(8, "height")', ModelFacts(image=(8, 4)), VGG),
    ],
    "spatial-needs-planes": [Sample("spatial(2)", "spatial(2)", ModelFacts(spatial_why="no convolution"), VGG)],
    "spatial-cuts-alone": [Sample("ep(2) * spatial(2)", "ep(2) * spatial(1)")],
    "the-batch-divides": [
        Sample("dp(3)", "dp(4)", GPT, GPT),
        Sample("dp(32) * accumulate(4)", "dp(32) * accumulate(2)", GPT, GPT),
        Sample("dp(16) * ep(8)", "dp(8) * ep(8)", GPT, GPT),
        Sample("pp(2, micro=3)", "pp(2, micro=4)", GPT, GPT),
    ],
    "sharded-optimizers-do-not-couple": [
        Sample("dp(2, zero=1)", "dp(2)", COUPLED, COUPLED),
        Sample("dp(2, zero=1)", "dp(2, zero=1)", COUPLED, LAYERWISE),
    ],
    "batch-loss-accumulates-nothing": [
        Sample("dp(2) * accumulate(2)", "dp(2)", ModelFacts(loss_over="batch"), ModelFacts(loss_over="batch")),
    ],
    "batch-loss-in-one-micro-batch": [
        Sample("pp(2, micro=4)", "pp(2, micro=1)", ModelFacts(loss_over="batch"), ModelFacts(loss_over="batch")),
    ],
    "batch-loss-has-full-sequences": [
        Sample("cp(2)", "dp(2)", ModelFacts(loss_over="batch"), ModelFacts(loss_over="batch")),
    ],
    "batch-loss-waits-for-all-replicas": [
        Sample("dp(2, sync=local(4))", "dp(2)", ModelFacts(loss_over="batch"), ModelFacts(loss_over="batch")),
    ],
    "micro-batch-loss-keeps-parts-separate": [
        Sample(
            "dp(2)",
            "dp(2)",
            ModelFacts(loss_over="micro-batch", batch_norm="sync"),
            ModelFacts(loss_over="micro-batch", batch_norm="local"),
        ),
    ],
    "ranks-match-the-world": [
        Sample("dp(8)", "dp(4)", world=4),
        Sample("dp(4, via=ps(1))", "dp(3, via=ps(1))", world=4),
    ],
}

ALL = [
    pytest.param(rule, sample, id=f"{rule}-{at}") for rule, rows in SAMPLES.items() for at, sample in enumerate(rows)
]


def test_every_rule_of_the_table_has_a_sample_and_every_sample_a_rule() -> None:
    assert {rule.name for rule in RULES} == set(SAMPLES)
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_every_rule_gives_its_reason_in_a_sentence() -> None:
    for rule in RULES:
        assert rule.why.endswith("."), rule.name
        assert len(rule.why) > 25, rule.name


@pytest.mark.parametrize(("rule", "sample"), ALL)
def test_a_rule_refuses_its_sample(rule: str, sample: Sample) -> None:
    refusals = check(parse(sample.refused), facts=sample.facts, world=sample.world)
    assert rule in {refusal.rule for refusal in refusals}


@pytest.mark.parametrize(("rule", "sample"), ALL)
def test_a_rule_passes_what_is_next_to_its_sample(rule: str, sample: Sample) -> None:
    assert check(parse(sample.passed), facts=sample.passed_facts, world=sample.world) == ()


@pytest.mark.parametrize(("rule", "sample"), ALL)
def test_a_refusal_names_a_term_a_reason_and_legal_alternatives(rule: str, sample: Sample) -> None:
    strategy = parse(sample.refused)
    for refusal in check(strategy, facts=sample.facts, world=sample.world):
        assert refusal.term in strategy.terms or refusal.term == strategy
        assert refusal.reason
        assert 1 <= len(refusal.nearest) <= 3, refusal
        for near in refusal.nearest:
            assert near != strategy
            assert check(near, facts=sample.facts, world=sample.world) == ()


@pytest.mark.parametrize(("rule", "sample"), ALL)
def test_a_rule_that_needs_a_fact_is_silent_without_it(rule: str, sample: Sample) -> None:
    if sample.facts is not None:
        assert rule not in {refusal.rule for refusal in check(parse(sample.refused))}


def test_the_refusal_of_a_tensor_split_reads_as_promised() -> None:
    (refusal,) = check(tp(3), facts=ModelFacts(heads=16))
    assert str(refusal) == "tp(3): 16 heads do not divide by 3; nearest legal: tp(2), tp(4)"
    assert refusal.term == tp(3)
    assert refusal.nearest == (Strategy(tp(2)), Strategy(tp(4)))


def test_a_wrong_world_is_named_with_strategies_that_fill_it() -> None:
    (refusal,) = check(dp(8, zero=1), world=4)
    assert "needs 8 ranks, 4 were given" in str(refusal)
    assert refusal.nearest == (Strategy(dp(4, zero=1)),)
    (refusal,) = check(serial, world=4)
    assert refusal.nearest == (Strategy(dp(4)),)


def test_alternatives_keep_to_the_world_that_was_given() -> None:
    (refusal,) = check(dp(2) * tp(3), world=6, facts=ModelFacts(heads=16))
    assert dp(3) * tp(2) in refusal.nearest
    assert all(near.world == 6 for near in refusal.nearest)


def test_moving_a_level_is_proposed_where_order_is_the_fault() -> None:
    (refusal,) = check(parse("dp(2) * dp(4, sync=diloco(5))"))
    assert parse("dp(4, sync=diloco(5)) * dp(2)") in refusal.nearest


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(IllegalStrategy) as caught:
        require_legal(parse("dp(7) * tp(3) * pp(5)"), world=8, facts=GPT)
    text = str(caught.value)
    for part in ("16 heads do not divide by 3", "global batch of 64", "105 ranks, 8 were given"):
        assert part in text
    assert isinstance(caught.value, ValueError)
    assert caught.value.refusals


def test_a_legal_strategy_is_returned_as_it_is() -> None:
    strategy = dp(2) * tp(2)
    assert require_legal(strategy, world=4, facts=GPT) is strategy
    assert require_legal(dp(2)) == Strategy(dp(2))


@pytest.mark.parametrize("world", [0, -1, True, 2.0, "4"])
def test_a_world_that_is_no_number_of_ranks_is_refused(world: object) -> None:
    with pytest.raises(ValueError, match="number of ranks"):
        check(dp(2), world=world)  # type: ignore[arg-type]


FACTS = st.builds(
    ModelFacts,
    layers=st.none() | st.integers(0, 40),
    heads=st.none() | st.integers(1, 40),
    kv_heads=st.none() | st.integers(1, 8),
    hidden=st.none() | st.sampled_from([1, 64, 96, 1000]),
    sequence=st.none() | st.integers(1, 4096),
    experts=st.none() | st.integers(0, 16),
    channels=st.none() | st.lists(st.integers(1, 512), max_size=4).map(tuple),
    image=st.none() | st.tuples(st.integers(1, 300), st.integers(1, 300)),
    global_batch=st.none() | st.integers(1, 512),
    tied=st.none() | st.booleans(),
    batch_norm=st.sampled_from([None, "sync", "local"]),
    clips=st.none() | st.booleans(),
    elementwise_optimizer=st.none() | st.booleans(),
    coupled_optimizer=st.none() | st.booleans(),
)


@pytest.mark.long
@given(strategies(), FACTS, st.none() | st.integers(1, 64) | st.just(10**12))
@settings(max_examples=60)
def test_whatever_is_asked_the_alternatives_are_legal_and_come_soon(
    strategy: Strategy, facts: ModelFacts, world: int | None
) -> None:
    start = time.process_time()
    refusals = check(strategy, facts=facts, world=world)
    assert time.process_time() - start < 10
    assert is_legal(strategy, facts=facts, world=world) == (not refusals)
    for refusal in refusals:
        assert len(refusal.nearest) <= 3
        for near in refusal.nearest:
            assert is_legal(near, facts=facts, world=world), (str(refusal), str(near))


@given(legal_strategies())
@settings(max_examples=50)
def test_the_generator_of_legal_strategies_keeps_its_word(strategy: Strategy) -> None:
    assert is_legal(strategy)


def test_a_legal_strategy_is_judged_fast_enough_to_enumerate_many() -> None:
    strategy = parse('dp(4, sync=diloco(50)) * pp(2, "1f1b", micro=8) * dp(2, zero=3) * tp(2)')
    start = time.process_time()
    for _ in range(200):
        assert is_legal(strategy, facts=GPT)
    assert (time.process_time() - start) / 200 < 2e-3


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_divisors_are_all_divisors_and_around_gives_the_next_ones(total: int, number: int) -> None:
    every = [candidate for candidate in range(1, total + 1) if total % candidate == 0]
    assert divisors(total) == every
    below = [candidate for candidate in every if candidate < number][-1:]
    assert around(total, number) == below + [candidate for candidate in every if candidate > number][:1]
