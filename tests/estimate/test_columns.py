"""What the planner's columns send is what the calls of a step send, counted in bytes.

On links of one byte a second, without latency and with nothing hidden, the seconds of the columns are bytes of the
wire. Compared is what both count: the columns are those of large models, without biases, and follow other frameworks
where those differ from the engine (fp16 gradients, ZeRO-3's head, messages of a pipeline cut by tp).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from shoal.calibration.job_model import job_model
from shoal.cluster import cluster
from shoal.estimate.cost import GOOD, PHYSICS, inputs_for
from shoal.estimate.cost.data import data_time
from shoal.estimate.cost.price import message_time
from shoal.estimate.cost.schedule import stages
from shoal.estimate.cost.time import head_time, layer_time
from shoal.estimate.step_calls import StepCalls, step_calls
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.price import representatives
from shoal.estimate.traffic import Call, gradient_calls, parameter_calls
from shoal.job import load_job
from shoal.layout.job_shape import shape_of
from shoal.shapes.shape import Transformer
from shoal.strategy import ModelFacts, Strategy, accumulate, cp, dp, is_legal, pp, recompute, tp

BYTES = replace(PHYSICS, bus=1.0, network=1.0, ramp=0.0, collective_s=0.0, message_s=0.0)
SHOWN = replace(
    GOOD, gradient_bytes=4.0, data_hidden=0.0, shard_hidden=0.0, data_exposed=1.0, buckets=0.0, tensor_hidden=0.0,
    regathered_bytes=1.0,
)  # fmt: skip
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
        terms.append(draw(st.sampled_from([tp(tensor), tp(tensor, sequence=True), cp(tensor)])))
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
        call for step in steps for times, placed in step.activations for _, call in placed for _ in range(times)
        if call[0] == axis
    ]  # fmt: skip


@given(strategy=strategies())
@settings(deadline=None, max_examples=60, phases=(Phase.explicit, Phase.generate), derandomize=True,
          suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])  # fmt: skip
def test_columns_send_what_the_calls_of_a_step_send(strategy: Strategy) -> None:
    model, facts, shape = read()
    assume(is_legal(strategy, world=strategy.world, facts=facts))
    tensor, context = strategy.term(tp), strategy.term(cp)
    pipeline, again = strategy.term(pp), strategy.term(recompute)
    micro, batch = strategy.micro_batches, model.global_batch
    steps = [
        step_calls(model.shapes, model.forward, strategy, global_batch=batch, rank=rank)
        for rank in representatives(strategy)
    ]
    data = next(iter(strategy.dp_levels), None)
    terms = {"tp": tensor, "cp": context, "pp": pipeline, "dp": data}
    ranks = {name: term.n if term is not None else 1 for name, term in terms.items()}
    inputs = inputs_for(
        shape, cluster("dgx-a100", devices=8), batch, **ranks, zero=data.zero if data else 0,
        sequence=bool(tensor and tensor.sequence), micro_batch=batch / ranks["dp"] / micro,
        schedule=pipeline.schedule if pipeline else "none", recompute=again.kind if again else "none", precision="fp32",
    )  # fmt: skip
    inputs = replace(
        inputs, level_bytes_per_s=0 * inputs.level_bytes_per_s + 1, level_latency_s=0 * inputs.level_latency_s
    )
    layer, heads = layer_time(inputs, SHOWN, BYTES), head_time(inputs, SHOWN, BYTES)
    if tensor is not None and pipeline is None:
        found = shape.layers * (layer.forward.tensor_s + layer.backward.tensor_s) + sum(each.tensor_s for each in heads)
        # The columns cut the stream nowhere and gather it nowhere, and recompute a block to its very end.
        half = batch / ranks["dp"] / micro * shape.sequence * shape.hidden * 4 * (tensor.n - 1) / tensor.n
        rounds = 1 if tensor.sequence else 2
        beyond = shape.layers * rounds * half * (again is not None) - 2 * half * tensor.sequence
        assert micro * (found[0] - beyond) == pytest.approx(wire_bytes(along(steps, "tp")))
    if context is not None and pipeline is None:
        found = shape.layers * (layer.forward.context_s + layer.backward.context_s)
        # Attention is computed behind the ring: next to nothing, on links this slow.
        assert micro * found[0] == pytest.approx(wire_bytes(along(steps, "cp")), rel=1e-3)
    if pipeline is not None and tensor is None:
        assert message_time(inputs, SHOWN, BYTES)[0] == max(steps[0].border_bytes)
    if data is not None and pipeline is None and context is None:
        found = data_time(inputs, SHOWN, BYTES, layer=layer, held=stages(inputs, SHOWN)).step_s
        sums = [*gradient_calls(steps[0].table), *parameter_calls(steps[0].table)]
        # Beyond the matrices: biases and padding, a twentieth of this small model, which tp does not cut.
        assert found[0] == pytest.approx(wire_bytes(sums), rel=0.05 * ranks["tp"])
