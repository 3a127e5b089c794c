"""What is priced is what the ledger's formulas predict, call by call, for any legal strategy of up to 8 ranks; and
known numbers of calls that earlier prices got wrong."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from estimate.machines import machine
from shoal.calibration.job_model import job_model
from shoal.estimate.axis_calls import axis_calls, buffer_calls
from shoal.estimate.held import Held
from shoal.estimate.shard_table import shard_table
from shoal.estimate.step_calls import StepCalls, micro_sizes, step_calls
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.price import price_step, representatives
from shoal.estimate.steps.timed_calls import activation_calls, collective_s, data_calls
from shoal.estimate.traffic import Call, calls_of
from shoal.job import Job, load_job, share
from shoal.layout.forward import Forward
from shoal.layout.observe import observe
from shoal.strategy import ModelFacts, Strategy, accumulate, cp, dp, ep, is_legal, local, parse, pp, recompute, tp
from shoal.strategy.terms.compress import fp16, gtopk, int8, none, powersgd, topk
from shoal.strategy.terms.term import Term

MOE = f"{Path(__file__).parents[1] / 'distributed' / 'jobs' / 'plain.py'}:moe"
JOBS = ["language:tiny", MOE, "image:tiny"]


@cache
def read(name: str) -> tuple[Job, JobModel, ModelFacts]:
    job = load_job(name)
    return (job, *job_model(job))


@cache
def forward_of(name: str, samples: int) -> Forward:
    job = read(name)[0]
    return observe(job, job.train.batch(np.arange(samples)))


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Axes of at most 8 ranks in any of the orders that are written, with their options."""
    left, terms = 8, []

    def size() -> int:
        nonlocal left
        n = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4) if n <= left]))
        left //= n
        return n

    if (n := size()) > 1:
        chunks = draw(st.sampled_from([1, 1, 2]))
        schedule = draw(st.sampled_from(["interleaved", "zero-bubble"] if chunks > 1 else ["gpipe", "1f1b"]))
        terms.append(pp(n, schedule, micro=n * draw(st.integers(1, 3)), chunks=chunks))
    for _ in range(draw(st.integers(0, 2))):
        if (n := size()) > 1:
            method = draw(st.sampled_from([none(), none(), int8(), topk(0.01), powersgd(2), fp16(), gtopk(0.01)]))
            terms.append(dp(n, zero=draw(st.integers(0, 3)), compress=method))
    if draw(st.booleans()) and (n := size()) > 1:
        terms.insert(0, dp(n, sync=local(draw(st.integers(1, 5)))))
    if (n := size()) > 1:
        ways = [tp(n), tp(n, sequence=True), tp(n, batch=True), cp(n), cp(n, "ulysses"), ep(n)]
        terms.append(draw(st.sampled_from(ways)))
    if (n := size()) > 1:
        terms.append(draw(st.sampled_from([tp(n), tp(n, sequence=True), ep(n), cp(n)])))
    more: list[Term] = []
    if not any(isinstance(term, pp) for term in terms):
        more += draw(st.sampled_from([[], [accumulate(2)], [accumulate(3)]]))
    more += draw(st.sampled_from([[], [recompute("full")], [recompute("selective")]]))
    try:
        return Strategy(*terms, *more)
    except ValueError:
        assume(False)
        raise


def priced(model: JobModel, step: StepCalls) -> Counter[Call]:
    """Every call that a price is made of, and the messages of a pipeline, which are timed with its schedule."""
    found: Counter[Call] = Counter(timed.call for timed in data_calls(step))
    for times, _, timed in activation_calls(model, step):
        found[timed.call] += times
    for times, placed in step.activations:
        for path, call in placed:
            if not path:
                found[call] += times
    return found


DRAWN = settings(
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
@given(strategy=strategies())
@settings(DRAWN, max_examples=25)
def test_what_is_priced_is_what_the_ledger_predicts(name: str, strategy: Strategy) -> None:
    compare(name, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
@given(strategy=strategies())
@settings(DRAWN, max_examples=600)
def test_what_is_priced_is_what_the_ledger_predicts_of_many_strategies(name: str, strategy: Strategy) -> None:
    compare(name, strategy)


def compare(name: str, strategy: Strategy) -> None:
    """The price reads one typical forward, scaled to each micro-batch; the prediction, a forward of its very shapes."""
    job, model, facts = read(name)
    assume(strategy.world > 1 and is_legal(strategy, world=strategy.world, facts=facts))
    for rank in representatives(strategy):
        step = step_calls(model.shapes, model.forward, strategy, global_batch=job.global_batch, rank=rank)
        held = Held(model.shapes, strategy, rank)
        samples = held.placing.split
        sizes = micro_sizes(job.global_batch, strategy.micro_batches, samples.ranks, samples.index)
        positions = np.arange(job.global_batch)
        split = [
            len(share(positions, rank=samples.index, ranks=samples.ranks, micro=m, micros=strategy.micro_batches))
            for m in range(strategy.micro_batches)
        ]
        assert sizes == [max(1, size) for size in split]
        if name == MOE and (held.regions or held.placing.experts.ranks > 1):
            predicted = calls_of(step.table)  # Data decide what experts send: the two forwards need not agree.
        else:
            forwards = [forward_of(name, size) for size in sizes]
            calls = [call for _, call in axis_calls(held, forwards, total=job.global_batch)]
            predicted = calls_of(shard_table(held, strategy, forwards[0], calls=[*calls, *buffer_calls(held)]))
        assert priced(model, step) == Counter(predicted)


def count(model: JobModel, text: str, kind: str, phase: str, rank: int = 0) -> int:
    step = step_calls(model.shapes, model.forward, parse(text), global_batch=model.global_batch, rank=rank)
    return sum(1 for call in calls_of(step.table) if call[1:3] == (phase, kind))


def test_under_a_pipeline_gradients_are_reduced_once_a_step() -> None:
    model = read("language:tiny")[1]
    for rank in (0, 2):
        text = 'pp(2, "1f1b", micro={}) * dp(2, zero={})'
        assert count(model, text.format(8, 2), "reduce_scatter", "gradient", rank) == 1
        assert count(model, text.format(2, 3), "reduce_scatter", "gradient", rank) == count(
            model, text.format(8, 3), "reduce_scatter", "gradient", rank
        )


def test_zero_3_gathers_root_and_last_block_in_forward_only() -> None:
    model = read("language:tiny")[1]
    units = len(model.blocks) + 1
    assert count(model, "dp(2, zero=3)", "all_gather", "forward") == units
    assert count(model, "dp(2, zero=3)", "all_gather", "backward") == units - 2
    assert count(model, "dp(2, zero=3) * accumulate(3)", "reduce_scatter", "gradient") == 3 * units


def test_levels_outside_the_one_that_shards_hold_copies() -> None:
    model = read("language:tiny")[1]
    step = step_calls(model.shapes, model.forward, parse("dp(2) * dp(2, zero=3)"), global_batch=model.global_batch)
    assert {buffer.sharding.ranks for buffer in step.table.buffers} == {2}
    one, two = (price_step(model, parse(text), machine()) for text in ("dp(2, zero=3)", "dp(2) * dp(2, zero=3)"))
    assert two.memory_split["parameters"] == one.memory_split["parameters"]
    assert two.memory_split["optimizer"] == one.memory_split["optimizer"]


@pytest.mark.parametrize("method", ["int8()", "topk(0.01)", "powersgd(4)", "gtopk(0.01)"])
def test_compressed_gradients_take_time_on_the_wire_but_less_than_dense_ones(method: str) -> None:
    model, slow = read("language:tiny")[1], machine(byte_s=1e-7)
    dense, packed = (
        price_step(model, parse(text), slow).step_split["data"] for text in ("dp(2)", f"dp(2, compress={method})")
    )
    assert 0 < packed < dense


@pytest.mark.parametrize("inner", ["", " * dp(2, zero=3)", ' * pp(2, "1f1b", micro=2)', " * tp(2)"])
def test_over_a_period_of_local_steps_each_call_is_paid_once(inner: str) -> None:
    """`tests/distributed/test_islands.py` holds the same calls to what is counted."""
    model, h, slow = read("language:tiny")[1], 4, machine(byte_s=1e-7)
    strategy = parse(f"dp(2, sync=local({h})){inner}")
    ranks = [
        step_calls(model.shapes, model.forward, strategy, global_batch=model.global_batch, rank=rank)
        for rank in representatives(strategy)
    ]
    held = [sum(buffer.padded_bytes // buffer.sharding.ranks for buffer in each.table.buffers) for each in ranks]
    assert [sum(call[3] for call in each.exchange) for each in ranks] == [24 + size for size in held]
    assert {(call[1:3], call[4]) for each in ranks for call in each.exchange} == {(("outer", "all_reduce"), 2)}
    wire_s = max(sum(collective_s(slow, *call[2:]) for call in each.exchange) for each in ranks)
    estimate = price_step(model, strategy, slow)
    assert h * estimate.step_split["averaging"] == pytest.approx(wire_s, rel=0.01)
    for each in ranks:
        assert {call[0] for call in each.exchange}.isdisjoint(call[0] for call in calls_of(each.table))
    more = price_step(model, parse(f"dp(2, sync=local({2 * h})){inner}"), slow)
    assert more.step_split["averaging"] == pytest.approx(estimate.step_split["averaging"] / 2)


def test_islands_whose_exchanges_are_not_known_in_advance_are_refused() -> None:
    with pytest.raises(ValueError, match="not known in advance"):
        price_step(read("language:tiny")[1], parse("dp(2, sync=ssp(3))"), machine())


def test_a_compression_whose_size_only_data_decide_is_refused() -> None:
    model = read("language:tiny")[1]
    with pytest.raises(ValueError, match="depends on the gradients"):
        price_step(model, parse("dp(2, compress=threshold(0.1))"), machine())
