"""What the planner's columns send is what the calls of a step send, counted in bytes.

On links of one byte a second, without latency and with nothing hidden, the seconds of the columns are bytes of the
wire. Compared is what both count: the columns are those of large models, without biases, and follow other frameworks
where those differ from the engine (fp16 gradients, ZeRO-3's head and its gathers under a pipeline, messages of a
pipeline cut by tp).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from shoal.calibration.job_model import job_model
from shoal.cluster import cluster
from shoal.comm.compress.traffic import LONG_AFTER
from shoal.estimate.cost import GOOD, PHYSICS, Inputs, inputs_for
from shoal.estimate.cost.data import data_time
from shoal.estimate.cost.price import message_time
from shoal.estimate.cost.schedule import messages, stages
from shoal.estimate.cost.time import head_time, layer_time
from shoal.estimate.expert_traffic import even_routing, expert_traffic
from shoal.estimate.step_calls import StepCalls, step_calls
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.price import representatives
from shoal.estimate.traffic import Call, gradient_calls, parameter_calls
from shoal.job import load_job
from shoal.layout.job_shape import shape_of
from shoal.planning.candidates import COMPRESSORS, of_strategies
from shoal.planning.price import _between_groups_s, inputs_of
from shoal.shapes.shape import Transformer
from shoal.strategy import (
    CompressTerm,
    ModelFacts,
    Strategy,
    accumulate,
    cp,
    dp,
    is_legal,
    none,
    parse,
    pp,
    recompute,
    tp,
)

BYTES = replace(PHYSICS, bus=1.0, network=1.0, ramp=0.0, collective_s=0.0, message_s=0.0)
SHOWN = replace(
    GOOD,
    gradient_bytes=4.0,
    data_hidden=0.0,
    shard_hidden=0.0,
    data_exposed=1.0,
    buckets=0.0,
    tensor_hidden=0.0,
    regathered_bytes=1.0,
)
"""A framework that hides nothing, sums gradients in 32 bits and keeps what sequence parallelism gathers: Shoal's."""


@cache
def read() -> tuple[JobModel, ModelFacts, Transformer]:
    job = load_job("language:tiny")
    return (*job_model(job), shape_of(job)[0])


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    sizes = [(a, b, c) for a in (1, 2, 3, 4) for b in (1, 2, 4) for c in (1, 2) if a * b * c <= 8]
    data, tensor, stages = draw(st.sampled_from(sizes))
    terms = [pp(stages, draw(st.sampled_from(["gpipe", "1f1b"])), micro=draw(st.integers(1, 3)))] if stages > 1 else []
    terms += [dp(data, zero=draw(st.integers(0, 2)))] if data > 1 else []
    if tensor > 1:
        terms.append(draw(st.sampled_from([tp(tensor), tp(tensor, sequence=True), cp(tensor), cp(tensor, "ulysses")])))
    more = [] if stages > 1 else draw(st.sampled_from([[], [accumulate(2)]]))
    more += draw(st.sampled_from([[], [recompute("full")]]))
    assume(terms)
    return Strategy(*terms, *more)


def wire_bytes(calls: list[Call]) -> float:
    """Of rings: an all-reduce goes round twice, a hop carries all of its bytes."""
    share = {"all_reduce": 2.0, "recv": 0.0}
    return sum(
        call[3] if call[2] == "send" else share.get(call[2], 1.0) * (call[4] - 1) / call[4] * call[3] for call in calls
    )


def along(steps: list[StepCalls], axis: str) -> list[Call]:
    return [
        call
        for step in steps
        for times, placed in step.activations
        for _, call in placed
        for _ in range(times)
        if call[0] == axis
    ]


def steps_of(strategy: Strategy) -> list[StepCalls]:
    model, _, _ = read()
    return [
        step_calls(model.shapes, model.forward, strategy, global_batch=model.global_batch, rank=rank)
        for rank in representatives(strategy)
    ]


def slow(inputs: Inputs) -> Inputs:
    """Links of one byte a second, without latency."""
    return replace(
        inputs, level_bytes_per_s=0 * inputs.level_bytes_per_s + 1, level_latency_s=0 * inputs.level_latency_s
    )


def columns_of(strategy: Strategy) -> Inputs:
    """One row."""
    model, _, shape = read()
    tensor, pipeline, again = strategy.term(tp), strategy.term(pp), strategy.term(recompute)
    data = next(iter(strategy.dp_levels), None)
    terms = {"tp": tensor, "cp": strategy.term(cp), "pp": pipeline, "dp": data}
    ranks = {name: term.n if term is not None else 1 for name, term in terms.items()}
    batch = model.global_batch
    return slow(
        inputs_for(
            shape,
            cluster("dgx-a100", devices=8),
            batch,
            **ranks,
            zero=data.zero if data else 0,
            sequence=bool(tensor and tensor.sequence),
            micro_batch=batch / ranks["dp"] / strategy.micro_batches,
            schedule=pipeline.schedule if pipeline else "none",
            chunks=pipeline.chunks if pipeline else 1,
            recompute=again.kind if again else "none",
            precision="fp32",
            ulysses=terms["cp"] is not None and terms["cp"].method == "ulysses",
        )
    )


@given(strategy=strategies())
@settings(
    deadline=None,
    max_examples=60,
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
def test_columns_send_what_the_calls_of_a_step_send(strategy: Strategy) -> None:
    _, facts, shape = read()
    assume(is_legal(strategy, world=strategy.world, facts=facts))
    tensor, context = strategy.term(tp), strategy.term(cp)
    pipeline, again = strategy.term(pp), strategy.term(recompute)
    micro, steps, inputs = strategy.micro_batches, steps_of(strategy), columns_of(strategy)
    layer, heads = layer_time(inputs, SHOWN, BYTES), head_time(inputs, SHOWN, BYTES)
    if tensor is not None and pipeline is None:
        found = shape.layers * (layer.forward.tensor_s + layer.backward.tensor_s) + sum(each.tensor_s for each in heads)
        # The columns cut the stream nowhere and gather it nowhere, and recompute a block to its very end.
        half = inputs.micro_batch[0] * shape.sequence * shape.hidden * 4 * (tensor.n - 1) / tensor.n
        rounds = 1 if tensor.sequence else 2
        beyond = shape.layers * rounds * half * (again is not None) - 2 * half * tensor.sequence
        assert micro * (found[0] - beyond) == pytest.approx(wire_bytes(along(steps, "tp")))
    if context is not None and pipeline is None:
        found = shape.layers * (layer.forward.context_s + layer.backward.context_s)
        # Attention is computed behind the ring: next to nothing, on links this slow.
        assert micro * found[0] == pytest.approx(wire_bytes(along(steps, "cp")), rel=1e-3)
    if pipeline is not None and tensor is None:
        assert message_time(inputs, SHOWN, BYTES)[0] == max(steps[0].border_bytes)
    if strategy.dp_levels and pipeline is None and context is None:
        found = data_time(inputs, SHOWN, BYTES, layer=layer, held=stages(inputs, SHOWN)).step_s
        sums = [*gradient_calls(steps[0].table), *parameter_calls(steps[0].table)]
        # Beyond the matrices: biases and padding, a twentieth of this small model, which tp does not cut.
        assert found[0] == pytest.approx(wire_bytes(sums), rel=0.05 * inputs.tp[0])


@pytest.mark.parametrize(
    "text",
    [
        "dp(2, zero=3)",
        "dp(4, zero=3)",
        "dp(3, zero=3) * accumulate(2)",
        "dp(2, zero=3) * recompute('full')",
    ],
)
def test_zero_3_gathers_and_sums_the_blocks_of_every_micro_batch(text: str) -> None:
    strategy, (_, _, shape) = parse(text), read()
    inputs, table = columns_of(strategy), steps_of(strategy)[0].table
    # Nothing of a gather hides behind computing.
    shown = replace(SHOWN, contention=0.0, unhidden=1.0)
    layer = layer_time(inputs, shown, BYTES)
    found = data_time(inputs, shown, BYTES, layer=layer, held=stages(inputs, shown)).layer_s
    _, *blocks = table.buffers
    own = replace(table, buffers=tuple(blocks))
    # The engine keeps the last block gathered for its backward; columns gather every layer twice.
    last = wire_bytes([("", "", "all_gather", blocks[-1].padded_bytes, table.samples.ranks)] * strategy.micro_batches)
    expected = wire_bytes([*gradient_calls(own), *parameter_calls(own)]) + last
    assert shape.layers * strategy.micro_batches * found[0] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("text", ["cp(2)", "cp(4, 'ulysses')"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_shared_keys_and_values_are_sent_once(text: str, kv_heads: int) -> None:
    """Each with a head of its own for every head of queries, or one for two of them."""
    context = parse(text).term(cp)
    assert context is not None
    inputs = slow(
        inputs_for(
            replace(read()[2], heads=4, kv_heads=kv_heads),
            cluster("dgx-a100", devices=8),
            4,
            cp=context.n,
            ulysses=context.method == "ulysses",
            schedule="none",
            precision="fp32",
        )
    )
    found = layer_time(inputs, SHOWN, BYTES)
    queries = 4 * float(inputs.micro_batch[0]) * read()[2].sequence // context.n * read()[2].hidden
    both = 2 * queries * kv_heads / 4
    forward = (context.n - 1) * both
    if context.method == "ulysses":
        forward = (2 * queries + both) * (context.n - 1) / context.n
    backward = forward if context.method == "ulysses" else 2 * forward
    assert found.forward.context_s[0] == pytest.approx(forward, rel=1e-3)
    assert found.backward.context_s[0] == pytest.approx(backward, rel=1e-3)


def test_interleaved_pipelines_pass_every_chunk_on() -> None:
    for micro in (2, 4, 6):
        strategy = pp(2, "interleaved", micro=micro, chunks=2) * Strategy()
        inputs, steps = columns_of(strategy), steps_of(strategy)
        assert message_time(inputs, SHOWN, BYTES)[0] == max(steps[0].border_bytes)
        calls = along(steps[:1], "pp")
        assert messages(inputs, inside=np.array([False]))[0] == len(calls)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("again", ["none", "full"])
def test_experts_exchange_what_the_calls_of_even_routing_exchange(ranks: int, active: int, again: str) -> None:
    shape = replace(read()[2], experts=8, active_experts=active)
    inputs = slow(
        inputs_for(
            shape,
            cluster("dgx-a100", devices=ranks),
            8 * ranks,
            dp=ranks,
            ep=ranks,
            micro_batch=8,
            schedule="none",
            recompute=again,
            precision="fp32",
        )
    )
    layer = layer_time(inputs, SHOWN, BYTES)
    runs = even_routing(
        ranks=ranks,
        experts=8,
        tokens=8 * shape.sequence,
        slots=active,
        width=shape.hidden,
        itemsize=4,
        form="listed",
        recomputed=again == "full",
    )
    # Columns leave out the counts, a few numbers for each rank.
    calls = [call for call in expert_traffic(runs) if call[3] != runs[0].counts_bytes]
    assert (layer.forward.expert_s + layer.backward.expert_s)[0] == pytest.approx(wire_bytes(calls))


@pytest.mark.parametrize("term", [term for term in COMPRESSORS if not isinstance(term, none)], ids=str)
@pytest.mark.parametrize("ranks", [2, 5])
def test_compressors_send_what_their_transfers_send(term: CompressTerm, ranks: int) -> None:
    shape = (1000, 3000)
    calls = term.transfers(shape, 4, ranks, LONG_AFTER)
    sent = term.ring_bytes(float(prod(shape)), float(sum(shape)), ranks=ranks, itemsize=4)
    assert calls is not None
    assert sent is not None
    found = sent[0] * sent[1] * (ranks - 1) / ranks
    assert found == pytest.approx(wire_bytes([("", "", *call, ranks) for call in calls]), rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "dp(2, sync=local(4))",
        "dp(3, sync=local(8))",
        "dp(2, sync=local(4)) * dp(2, zero=1)",
        "dp(2, sync=local(2)) * dp(2)",
        "dp(2, sync=local(4)) * tp(2)",
    ],
)
def test_islands_average_what_the_calls_of_an_exchange_send(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, (model, _, shape) = parse(text), read()
    monkeypatch.setattr("shoal.planning.price.PHYSICS", BYTES)
    rows = of_strategies([strategy], global_batch=model.global_batch)
    inputs = slow(inputs_of(rows, shape=shape, cluster=cluster("dgx-a100", devices=8)))
    split = {"compute": np.zeros(1)}
    found = _between_groups_s(rows, inputs, split, profile=SHOWN)[0]
    step = steps_of(strategy)[0]
    tensor = strategy.term(tp)
    # Beyond the matrices: biases, which tp does not cut, and the head, which columns count on the last stage.
    head = 2 * 4 * shape.vocab * shape.hidden / (tensor.n if tensor else 1) / step.period
    head *= (step.exchange[-1][-1] - 1) / step.exchange[-1][-1] / (rows.dp[0] if rows.zero[0] else 1)
    assert found + head == pytest.approx(wire_bytes(list(step.exchange)) / step.period, rel=0.07)
