"""The event simulation agrees with the estimate, and what goes wrong does what it must."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.cluster import PRESETS, Cluster, cluster
from shoal.estimate.cost import PROFILES, inputs_for, price
from shoal.estimate.simulate import (
    CALM,
    Disturbance,
    Links,
    Straggler,
    goodput,
    perfetto,
    simulate_step,
    simulate_steps,
    step_costs,
)
from shoal.estimate.simulate.costs import StepCosts
from shoal.estimate.simulate.disturb import BadDisturbance
from shoal.estimate.simulate.goodput import Goodput, young_interval_s
from shoal.shapes.presets import preset
from shoal.shapes.shape import Transformer

DRAWN = (Phase.explicit, Phase.generate)


def costs_of(shape: Transformer, place: Cluster, *, micro: int, micro_batch: int, dp: int, **more: object) -> StepCosts:
    inputs = inputs_for(shape, place, dp * micro * micro_batch, dp=dp, micro_batch=micro_batch, **more)
    return step_costs(inputs)


@st.composite
def small_cases(draw: st.DrawFn) -> dict:
    """Whatever is legal and small: uneven stages, fewer micro-batches than ranks, slow links, heavy heads, experts."""
    pp = draw(st.integers(1, 8))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"])) if pp > 1 else "none"
    chunks = draw({"zero-bubble": st.integers(1, 2), "interleaved": st.integers(2, 8)}.get(schedule, st.just(1)))
    stages = pp * chunks
    experts = draw(st.sampled_from([0, 0, 8]))
    dp = draw(st.sampled_from([1, 2, 4]))
    return {
        "shape": Transformer(
            layers=stages * draw(st.integers(1, 4)) + draw(st.integers(0, stages - 1)),
            hidden=draw(st.sampled_from([256, 1024, 4096])),
            heads=16,
            ffn=draw(st.sampled_from([1024, 8192])),
            gated=draw(st.booleans()),
            vocab=draw(st.sampled_from([64, 30_000, 128_000, 256_000])),
            sequence=draw(st.sampled_from([128, 2048])),
            experts=experts,
            active_experts=2 if experts else 0,
        ),
        "place": draw(st.sampled_from(sorted(PRESETS))),
        "profile": draw(st.sampled_from(sorted(PROFILES))),
        "degrees": {
            "pp": pp,
            "dp": dp,
            "tp": draw(st.sampled_from([1, 2])),
            "ep": min(dp, 2) if experts else 1,
        },
        "micro": pp * draw(st.integers(1, 4)) if schedule == "interleaved" else draw(st.integers(1, 16)),
        "micro_batch": draw(st.sampled_from([1, 2, 4])),
        "schedule": schedule,
        "chunks": chunks,
        "zero": draw(st.integers(0, 3)),
        "recompute": "none" if schedule == "zero-bubble" else draw(st.sampled_from(["none", "selective", "full"])),
        "precision": "fp16",
    }


@pytest.mark.long
@given(case=small_cases())
@settings(max_examples=500, deadline=None, phases=DRAWN)
def test_the_price_equals_the_event_play_within_one_percent(case: dict) -> None:
    where, degrees = cluster(case.pop("place")), case.pop("degrees")
    profile, shape = PROFILES[case.pop("profile")], case.pop("shape")
    world = degrees["pp"] * degrees["dp"] * degrees["tp"]
    place = where.resized(-(-world // where.node) * where.node)
    inputs = inputs_for(shape, place, degrees["dp"] * case.pop("micro") * case["micro_batch"], **degrees, **case)
    priced = price(inputs, profile)
    assert simulate_step(step_costs(inputs, profile)).step_s == pytest.approx(float(priced.step_s[0]), rel=0.01)
    assert sum(float(np.ravel(part)[0]) for part in priced.split_s.values()) == pytest.approx(float(priced.step_s[0]))
    assert all(float(np.ravel(part)[0]) >= -1e-12 for part in priced.split_s.values())


@pytest.fixture(scope="module")
def calm() -> StepCosts:
    return costs_of(
        preset("gpt:13b"), cluster("dgx-a100", devices=64), micro=8, micro_batch=1, dp=8, pp=4, tp=2, schedule="1f1b"
    )


def test_classes_do_what_all_replicas_would(calm: StepCosts) -> None:
    marked = Disturbance(stragglers=(Straggler(rank=5, factor=1.7), Straggler(rank=40, factor=1.2)))
    few = simulate_step(calm, marked)
    assert len(few.counts) == 3
    assert few.counts.sum() == calm.replicas
    # Noise of nothing makes every replica a class of its own.
    every = simulate_step(calm, replace(marked, noise=1e-15))
    assert len(every.counts) == calm.replicas
    assert every.step_s == pytest.approx(few.step_s, rel=1e-12)


@given(factor=st.floats(1.0, 8.0), rank=st.integers(0, 63))
@settings(max_examples=30, deadline=None, phases=DRAWN)
def test_a_straggler_slows_a_step_but_never_more_than_itself(calm: StepCosts, factor: float, rank: int) -> None:
    undisturbed = simulate_step(calm).step_s
    found = simulate_step(calm, Disturbance(stragglers=(Straggler(rank=rank, factor=factor),))).step_s
    assert undisturbed * (1 - 1e-12) <= found <= factor * undisturbed * (1 + 1e-12)


def test_a_link_with_half_its_bandwidth_doubles_messages_and_gradients(calm: StepCosts) -> None:
    half = simulate_step(calm, Disturbance(links=(Links(rank=0, left=0.5),)))
    slowed = replace(calm, message_s=2 * calm.message_s, data_s=2 * calm.data_s)
    assert simulate_step(calm).step_s < half.step_s <= simulate_step(slowed).step_s * (1 + 1e-12)


def test_random_slow_downs_repeat_by_seed_and_differ_by_step(calm: StepCosts) -> None:
    noisy = Disturbance(noise=0.05, seed=3)
    first, again = ([step.step_s for step in simulate_steps(calm, noisy, steps=4)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 4
    assert min(first) > simulate_step(calm).step_s
    assert [step.step_s for step in simulate_steps(calm, replace(noisy, seed=4), steps=4)] != first


def test_more_replicas_wait_longer_for_the_slowest(calm: StepCosts) -> None:
    noisy = Disturbance(noise=0.05)
    few, many = (replace(calm, replicas=replicas, waits=0.0) for replicas in (2, 512))
    mean = [np.mean([step.step_s for step in simulate_steps(each, noisy, steps=10)]) for each in (few, many)]
    assert mean[1] > mean[0]


@pytest.mark.parametrize(
    "wrong",
    [
        Disturbance(stragglers=(Straggler(rank=64, factor=2.0),)),
        Disturbance(stragglers=(Straggler(rank=0, factor=0.5),)),
        Disturbance(links=(Links(rank=0, left=0.0),)),
        Disturbance(noise=-1.0),
    ],
)
def test_what_cannot_go_wrong_is_refused(calm: StepCosts, wrong: Disturbance) -> None:
    with pytest.raises(BadDisturbance):
        simulate_step(calm, wrong)


def test_the_trace_holds_every_pass_once_and_none_overlap_on_a_rank(calm: StepCosts) -> None:
    step = simulate_step(calm)
    events = [event for event in json.loads(perfetto([step]))["traceEvents"] if event["ph"] == "X"]
    passes = [event for event in events if event["cat"] in ("F", "BW")]
    assert len(passes) == 2 * calm.term.n * calm.term.micro
    for rank in range(calm.term.n):
        mine = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == rank)
        for (start, span), (after, _) in pairwise(mine):
            assert after >= start + span - 1e-3


def test_sixteen_thousand_ranks_are_played_by_their_classes() -> None:
    inputs = inputs_for(
        preset("gpt:1t"), cluster("dgx-a100", devices=16_384), 32 * 64, dp=32, pp=64, tp=8, schedule="1f1b"
    )
    costs = step_costs(inputs)
    assert costs.ranks == 16_384
    step = simulate_step(costs)
    assert step.starts_s.shape == (2 * 64 * 64, 1)
    assert step.step_s == pytest.approx(float(price(inputs).step_s[0]), rel=0.01)


def test_islands_wait_for_each_other_only_when_they_are_averaged(calm: StepCosts) -> None:
    islands = replace(calm, islands=2, period=4, average_s=0.5)
    quiet = [step.step_s for step in simulate_steps(islands, steps=8)]
    assert quiet[:3] == pytest.approx([simulate_step(calm).step_s] * 3)
    assert sum(quiet[:4]) == pytest.approx(4 * simulate_step(calm).step_s + 0.5 * (1 + calm.waits))
    assert quiet[:4] == pytest.approx(quiet[4:])
    noisy = Disturbance(noise=0.3, seed=3)
    alone = sum(step.step_s for step in simulate_steps(replace(islands, average_s=0.0), noisy, steps=4))
    together = sum(step.step_s for step in simulate_steps(calm, noisy, steps=4))
    assert alone < together  # Who is slow in one step may be fast in the next.
    slow = simulate_step(islands, Disturbance(stragglers=(Straggler(rank=0, factor=2.0),)))
    assert slow.island_s[0] > slow.island_s[1] == pytest.approx(simulate_step(calm).step_s)


def simulated_goodput(of: Goodput, *, work_s: float, seed: int = 0) -> float:
    """The same by simulation: failures drawn at random while so much work is done."""
    draw = np.random.default_rng(seed)
    clock_s, done_s = 0.0, 0.0
    failure_s = draw.exponential(of.mtbf_s)
    while done_s < work_s:
        stretch_s = min(of.interval_s, work_s - done_s) + of.checkpoint_s
        if clock_s + stretch_s <= failure_s:
            clock_s += stretch_s
            done_s += min(of.interval_s, work_s - done_s)
            continue
        clock_s = failure_s
        # A restart may fail as well, and begins again.
        failure_s = clock_s + draw.exponential(of.mtbf_s)
        while clock_s + of.restart_s > failure_s:
            clock_s = failure_s
            failure_s = clock_s + draw.exponential(of.mtbf_s)
        clock_s += of.restart_s
    return work_s / clock_s


def test_young_and_daly_agree_with_playing_failures() -> None:
    found = goodput(devices=16_384, checkpoint_s=60, restart_s=300, device_mtbf_h=50_000)
    assert found.mtbf_s == pytest.approx(50_000 * 3600 / 16_384)
    assert found.interval_s == pytest.approx(np.sqrt(2 * 60 * found.mtbf_s), rel=0.1)
    assert found.part == pytest.approx(simulated_goodput(found, work_s=4000 * found.mtbf_s, seed=1), rel=0.01)
    for factor in (0.3, 3.0):
        other = goodput(
            devices=16_384, checkpoint_s=60, restart_s=300, device_mtbf_h=50_000, interval_s=factor * found.interval_s
        )
        assert other.part < found.part


def test_goodput_falls_with_devices_and_is_nothing_where_failures_outrun_checkpoints() -> None:
    parts = [goodput(devices=devices, checkpoint_s=60).part for devices in (8, 1024, 16_384, 131_072)]
    assert parts == sorted(parts, reverse=True)
    assert goodput(devices=1, checkpoint_s=60).part > 0.99
    assert goodput(devices=10**9, checkpoint_s=60).part < 1e-3
    assert young_interval_s(checkpoint_s=100, mtbf_s=10) == 10


def test_without_disturbance_one_class_stands_for_all(calm: StepCosts) -> None:
    assert simulate_step(calm, CALM).counts.tolist() == [calm.replicas]
