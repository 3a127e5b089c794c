"""Properties of prices that hold for every model, cluster and strategy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import cluster
from shoal.estimate.cost import GOOD, PHYSICS, PROFILES, Inputs, gathered, inputs_for, price
from shoal.estimate.cost.price import SPLIT
from shoal.shapes.presets import preset

SIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """A candidate strategy, with the model, the profile and the cluster it is for."""
    pp = draw(SIZES)
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"])) if pp > 1 else "none"
    return {
        "shape": draw(st.sampled_from(["gpt:13b", "llama3:70b", "mixtral:8x7b", "bert:large"])),
        "cluster": draw(st.sampled_from(["a100", "h100", "v100-32", "gb200", "cloud-10gbe"])),
        "profile": draw(st.sampled_from(sorted(PROFILES))),
        "dp": draw(SIZES),
        "tp": draw(SIZES),
        "pp": pp,
        "cp": draw(SIZES),
        "zero": draw(st.sampled_from([0, 1, 2, 3])),
        "sequence": draw(st.booleans()),
        "micro_batch": draw(SIZES),
        "chunks": 2 if schedule == "interleaved" else 1,
        "schedule": schedule,
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "precision": draw(st.sampled_from(["bf16", "fp16", "fp8", "fp32"])),
    }


def inputs_of(case: dict[str, object], **changed: object) -> Inputs:
    columns = {name: value for name, value in case.items() if name not in ("shape", "cluster", "profile")} | changed
    return inputs_for(preset(str(case["shape"])), cluster(str(case["cluster"])), 512, **columns)  # type: ignore[arg-type]


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(case=cases(), ratio=st.sampled_from([1.5, 4.0]), level=st.sampled_from([None, 0, 1]))
def test_more_bandwidth_is_never_slower(case: dict[str, object], ratio: float, level: int | None) -> None:
    inputs, profile = inputs_of(case), PROFILES[str(case["profile"])]
    factors = np.ones((inputs.level_bytes_per_s.shape[0], 1))
    factors[slice(None) if level is None else level] = ratio
    faster = price(replace(inputs, level_bytes_per_s=inputs.level_bytes_per_s * factors), profile).step_s
    assert np.all(faster <= price(inputs, profile).step_s * (1 + 1e-9))


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_a_step_takes_at_least_its_products_at_the_best_measured_rate(case: dict[str, object]) -> None:
    inputs, shape = inputs_of(case), preset(str(case["shape"]))
    linear = shape.active_parameters - (1 if shape.tied else 2) * shape.vocab * shape.hidden
    flops = 6 * linear * shape.sequence * 512 / inputs.devices
    gain = PHYSICS.fp8_gain if case["precision"] == "fp8" else 1.0
    assert price(inputs, PROFILES[str(case["profile"])]).step_s[0] >= flops[0] / (inputs.matmul_flops[0] * gain)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_splits_sum_to_their_wholes_and_are_never_negative(case: dict[str, object]) -> None:
    prices = price(inputs_of(case), PROFILES[str(case["profile"])])
    assert set(prices.split_s) == set(SPLIT)
    assert sum(prices.split_s.values()) == pytest.approx(prices.step_s)
    assert sum(prices.memory.split_bytes.values()) == pytest.approx(prices.memory_bytes)
    for part in (*prices.split_s.values(), *prices.memory.split_bytes.values()):
        assert np.all(part >= -1e-12)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_an_axis_of_one_costs_nothing(case: dict[str, object]) -> None:
    prices = price(inputs_of(case, dp=1, tp=1, pp=1, cp=1, schedule="none", chunks=1), PROFILES[str(case["profile"])])
    for cause in ("tensor", "context", "expert", "data", "pipeline", "bubble"):
        assert np.all(prices.split_s[cause] == 0), cause


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_memory_never_rises_with_the_stage_of_zero_without_a_pipeline(case: dict[str, object]) -> None:
    inputs = inputs_of(case, dp=64, pp=1, schedule="none", chunks=1, zero=np.arange(3))
    held = price(inputs, PROFILES[str(case["profile"])]).memory_bytes
    assert np.all(np.diff(held) <= 1e-6 * held[0])


def test_stage_three_of_zero_needs_least_where_layers_are_many() -> None:
    inputs = inputs_for(preset("gpt:13b"), cluster("a100", devices=64), 64, dp=64, zero=np.arange(4), schedule="none")
    held = price(inputs).memory_bytes
    assert np.argmin(held) == 3


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_recomputing_takes_longer_and_keeps_less(case: dict[str, object]) -> None:
    # On a device that holds either: one that is overfull takes longer for another reason.
    inputs = replace(inputs_of(case, recompute=["none", "full"]), memory_bytes=np.array([1e15]))
    prices = price(inputs, PROFILES[str(case["profile"])])
    assert prices.step_s[1] >= prices.step_s[0] * (1 - 1e-9)
    assert prices.memory_bytes[1] <= prices.memory_bytes[0] * (1 + 1e-9)


def test_many_candidates_cost_what_each_costs_alone() -> None:
    tp, pp = (grid.ravel() for grid in np.meshgrid([1, 2, 4, 8], [1, 2, 4]))
    columns = {
        "tp": tp,
        "pp": pp,
        "dp": 64 // (tp * pp),
        "zero": np.where(pp == 1, 3, 1),
        "micro_batch": np.arange(12) % 3 + 1,
    }
    shape, place = preset("gpt:22b"), cluster("a100", devices=64)
    together = price(inputs_for(shape, place, 192, **columns))  # type: ignore[arg-type]
    for row in range(12):
        alone = price(inputs_for(shape, place, 192, **{name: value[row] for name, value in columns.items()}))
        assert alone.step_s[0] == pytest.approx(together.step_s[row])
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[row])


def test_profiles_of_rows_are_gathered_into_columns() -> None:
    inputs = inputs_for(preset("gpt:1.3b"), cluster("a100", devices=8), 32, dp=[4, 4], tp=2, zero=0, schedule="none")
    both = price(inputs, gathered((GOOD, PROFILES["nanotron"]), np.array([0, 1]))).step_s
    assert both[0] == pytest.approx(price(inputs, GOOD).step_s[0])
    assert both[1] == pytest.approx(price(inputs, PROFILES["nanotron"]).step_s[1])


def test_tensor_parallelism_across_nodes_costs_more_than_within_one() -> None:
    shape, place = preset("gpt:22b"), cluster("a100", devices=64)
    inside = price(inputs_for(shape, place, 64, tp=8, dp=8, schedule="none"))
    across = price(inputs_for(shape, place, 64, tp=8, dp=8, schedule="none", order=("dp", "tp", "cp", "pp")))
    assert across.tensor_s[0] > 2 * inside.tensor_s[0]


def test_an_nvl72_rack_carries_tensor_parallelism_over_sixteen() -> None:
    shape = preset("llama3:405b")
    rack = price(
        inputs_for(shape, cluster("gb200", devices=72 * 8), 64, tp=16, dp=36, zero=1, schedule="none", sequence=True)
    )
    nodes = price(
        inputs_for(shape, cluster("b200", devices=576), 64, tp=16, dp=36, zero=1, schedule="none", sequence=True)
    )
    assert rack.tensor_s[0] < 0.7 * nodes.tensor_s[0]


def test_experts_exchange_more_across_nodes() -> None:
    shape, place = preset("mixtral:8x7b"), cluster("h100", devices=64)
    inside = price(inputs_for(shape, place, 256, dp=64, ep=8, zero=1, schedule="none"))
    across = price(inputs_for(shape, place, 256, dp=64, ep=8, zero=1, schedule="none", placed={"ep": 8.0}))
    none = price(inputs_for(shape, place, 256, dp=64, ep=1, zero=1, schedule="none"))
    assert none.expert_s[0] == 0
    assert across.expert_s[0] > 2 * inside.expert_s[0] > 0
    assert inside.memory.split_bytes["parameters"][0] < none.memory.split_bytes["parameters"][0]


def test_a_device_with_more_memory_never_fits_less() -> None:
    inputs = inputs_for(preset("gpt:13b"), cluster("a100", devices=64), 64, dp=64, zero=np.arange(4), schedule="none")
    larger = replace(inputs, memory_bytes=inputs.memory_bytes * 2)
    assert np.all(price(larger).fits >= price(inputs).fits)


def test_a_step_that_overfills_its_device_takes_longer_where_the_profile_says_so() -> None:
    inputs = inputs_for(preset("gpt:13b"), cluster("a100", devices=8), 64, dp=8, zero=1, micro_batch=8, schedule="none")
    roomy = replace(inputs, memory_bytes=inputs.memory_bytes * 100)
    slow = replace(GOOD, overfull=3.0)
    assert price(inputs, slow).step_s[0] > 2.5 * price(inputs, GOOD).step_s[0]
    assert price(roomy, slow).step_s[0] == price(roomy, GOOD).step_s[0]


def test_folded_experts_send_a_token_once_to_a_node() -> None:
    shape, place = preset("mixtral:8x7b"), cluster("h100", devices=64)
    inputs = inputs_for(shape, place, 256, dp=64, ep=8, zero=1, schedule="none", placed={"ep": 1.0})
    across = inputs_for(shape, place, 256, dp=32, tp=2, ep=8, zero=1, schedule="none")
    folded = replace(GOOD, expert_folded=1.0)
    assert price(inputs, folded).expert_s[0] == pytest.approx(price(inputs, GOOD).expert_s[0])
    assert price(across, folded).expert_s[0] < 0.5 * price(across, GOOD).expert_s[0]


def test_hosts_wait_for_those_of_their_node_only() -> None:
    shape = preset("gpt:1.3b")
    hosts = [
        price(inputs_for(shape, cluster("a100", devices=64), 64, tp=tp, dp=64 / tp, schedule="none")).step_s[0]
        - price(
            inputs_for(shape, cluster("a100", devices=64), 64, tp=tp, dp=64 / tp, schedule="none"),
            replace(GOOD, host_tensor_s=0.0),
        ).step_s[0]
        for tp in (8, 16)
    ]
    # Twice as many ranks make half as many replicas, each with twice the passes: the waiting of a pass stays.
    assert hosts[1] < 2.5 * hosts[0]
