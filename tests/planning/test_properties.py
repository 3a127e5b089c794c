"""What must hold of prices and plans whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.cluster import Cluster, Level, cluster
from shoal.cluster.cluster import Device
from shoal.planning.candidates import ORDERS, Candidates, of_strategies
from shoal.planning.counterfactual import with_links
from shoal.planning.enumerate import compressed, enumerate_legal
from shoal.planning.legal import facts_of
from shoal.planning.price import joined, price_candidates
from shoal.planning.rank import make_plan, question_for
from shoal.shapes.presets import preset
from shoal.shapes.shape import Transformer
from shoal.strategy import parse

DRAWN = (Phase.explicit, Phase.generate)
"""Cases are small and named by five values: shrinking them only takes time."""

MODELS = st.sampled_from(["gpt2:small", "gpt:1.3b", "llama3:8b", "mixtral:8x7b", "bert:large"])
CLUSTERS = st.sampled_from(["dgx-a100", "lassen", "dgx-h100", "cloud-t4-10gbe", "frontier"])
WORLDS = st.sampled_from([8, 16, 32])


def some_rows(shape: Transformer, place: Cluster, *, batch: int, seed: int, most: int = 500) -> Candidates:
    rows = enumerate_legal(world=place.devices, facts=facts_of(shape, global_batch=batch), node=place.node)
    draw = np.random.default_rng(seed)
    few = rows.rows(draw.choice(len(rows), size=min(most, len(rows)), replace=False))
    return few


def both_kinds(shape: Transformer, place: Cluster, rows: Candidates):
    priced = price_candidates(rows, shape=shape, cluster=place, everything=True)
    more = compressed(rows, node=place.node)
    return joined(priced, price_candidates(more, shape=shape, cluster=place, everything=True)) if len(more) else priced


@pytest.mark.long
@given(
    name=MODELS,
    where=CLUSTERS,
    world=WORLDS,
    ratio=st.floats(1.01, 50),
    level=st.integers(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, phases=DRAWN)
def test_more_bandwidth_is_never_slower(name, where, world, ratio, level, seed) -> None:
    shape, place = preset(name), cluster(where, devices=world)
    rows = some_rows(shape, place, batch=64, seed=seed)
    before, after = both_kinds(shape, place, rows), both_kinds(shape, with_links(place, ratio, level=level), rows)
    assert (after.step_s <= before.step_s * (1 + 1e-12)).all()


@given(name=MODELS, world=WORLDS, small=st.floats(2, 100), more=st.floats(1.0, 4.0))
@settings(max_examples=15, deadline=None, phases=DRAWN)
def test_more_memory_never_means_fewer_plans(name, world, small, more) -> None:
    shape, place = preset(name), cluster("dgx-a100", devices=world)

    def fitting(gigabytes: float) -> set[int]:
        sized = replace(place, device=replace(place.device, memory_bytes=gigabytes * 1e9))
        rows = some_rows(shape, sized, batch=64, seed=0, most=3000)
        return set(np.flatnonzero(price_candidates(rows, shape=shape, cluster=sized).fits))

    assert fitting(small) <= fitting(small * more)


@given(name=MODELS, where=CLUSTERS, world=WORLDS, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None, phases=DRAWN)
def test_a_step_takes_at_least_its_arithmetic_at_peak(name, where, world, seed) -> None:
    shape, place = preset(name), cluster(where, devices=world)
    rows = some_rows(shape, place, batch=64, seed=seed)
    priced = price_candidates(rows, shape=shape, cluster=place, everything=True)
    multiplied = shape.active_parameters - (0 if shape.tied else shape.vocab * shape.hidden)
    bound_s = 6 * multiplied * 64 * shape.sequence / (world * place.device.peak("bf16"))
    assert (priced.step_s >= bound_s).all()
    assert np.allclose(sum(priced.split_s.values()), priced.step_s)


@given(name=MODELS, where=CLUSTERS, world=WORLDS, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None, phases=DRAWN)
def test_an_axis_of_one_sends_nothing(name, where, world, seed) -> None:
    shape, place = preset(name), cluster(where, devices=world)
    priced = price_candidates(some_rows(shape, place, batch=64, seed=seed), shape=shape, cluster=place, everything=True)
    rows = priced.rows
    for cause, alone in {
        "tensor": rows.tp == 1,
        "context": rows.cp == 1,
        "expert": rows.ep == 1,
        "pipeline": rows.pp == 1,
        "bubble": rows.pp == 1,
        "data": rows.outer * rows.dp * rows.ep * rows.cp == 1,
    }.items():
        assert (priced.split_s[cause][alone] == 0).all(), cause


def test_one_rank_is_serial() -> None:
    shape, place = preset("gpt2:small"), cluster("dgx-a100", devices=1)
    rows = enumerate_legal(world=1, facts=facts_of(shape, global_batch=4), node=1, precision="bf16")
    assert {str(rows.strategy(row)).split(" * ")[0] for row in range(len(rows))} <= {
        'amp("bf16")',
        "accumulate(2)",
        "accumulate(4)",
        'recompute("full")',
        'recompute("selective")',
    }
    texts = ["serial", "dp(1)", "tp(1)", "pp(1, micro=1)", "dp(1, zero=3)"]
    priced = price_candidates(
        of_strategies([parse(text) for text in texts], global_batch=4), shape=shape, cluster=place, everything=True
    )
    assert np.ptp(priced.step_s) == 0
    assert np.ptp(priced.memory_bytes) == 0
    assert sum(priced.split_s[name][0] for name in ("tensor", "context", "expert", "data", "pipeline", "bubble")) == 0


def test_compression_pays_on_slow_links_and_not_on_fast_ones() -> None:
    shape = preset("gpt2:medium")
    device = cluster("dgx-a100").device

    def best(gigabits: float) -> str:
        levels = (
            Level(ranks=1, bytes_per_s=3e11, latency_s=7e-6),
            Level(ranks=8, bytes_per_s=gigabits / 8 * 1e9, latency_s=4e-5),
        )
        place = Cluster(name="hosts", device=device, levels=levels, devices=8)
        plan = make_plan(question_for(shape, place, global_batch=64))
        return str(plan.strategy(plan.best))

    assert "compress" in best(0.1)
    assert "compress" not in best(400)


def test_a_device_without_room_for_anything_gets_no_plan() -> None:
    place = cluster("dgx-a100", devices=8)
    small = replace(
        place, device=Device(name="small", peak_flops={"bf16": 1e14}, memory_bytes=2e9, memory_bytes_per_s=1e12)
    )
    assert make_plan(question_for(preset("gpt:13b"), small, global_batch=64)).best is None
    assert make_plan(question_for(preset("gpt:13b"), place, global_batch=64)).best is not None


@pytest.mark.parametrize("by", ["time", "step", "cost"])
def test_the_ranking_is_by_what_was_asked_for(by: str) -> None:
    plan = make_plan(question_for(preset("gpt:1.3b"), cluster("dgx-a100", devices=16), global_batch=64, by=by))
    score = plan.score[plan.ranked]
    assert (np.diff(score) >= 0).all()
    assert plan.priced.fits[plan.ranked].all()
    assert len(plan.ranked) == plan.priced.fits.sum()


@pytest.mark.parametrize("name", ["gpt:1.3b", "mixtral:8x7b"])
def test_replicas_on_different_nodes_feel_the_network(name: str) -> None:
    """Whatever lies between them: an expert axis of one, or the stages of a pipeline."""
    shape, place = preset(name), cluster("cloud-t4-10gbe", devices=16)
    rows = some_rows(shape, place, batch=64, seed=0, most=2000)
    outermost = np.array([order[-1] == "dp" for order in ORDERS])[rows.order]
    apart = (rows.dp > 1) & (rows.outer == 1) & outermost & (rows.world // rows.dp >= place.node)
    near, far = (
        price_candidates(rows, shape=shape, cluster=where, everything=True).split_s["data"]
        for where in (place, with_links(place, 0.01, level=1))
    )
    assert apart.any()
    assert (far[apart] > near[apart]).all()
