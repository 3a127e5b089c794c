"""Single causes of time and memory, each against its formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.cluster import cluster
from shoal.estimate.cost import GOOD, PROFILES, Inputs, inputs_for, price, profile_for
from shoal.estimate.cost.data import gathered_again
from shoal.estimate.cost.memory import activations
from shoal.estimate.cost.schedule import in_flight, stages, weights_waiting
from shoal.estimate.cost.weights import weights
from shoal.shapes.presets import preset

SHAPE, PLACE = preset("gpt:13b"), cluster("a100", devices=64)


def inputs_of(**columns: object) -> Inputs:
    return inputs_for(SHAPE, PLACE, 512, **{"schedule": "1f1b", **columns})  # type: ignore[arg-type]


def test_zero_two_reduces_once_under_a_pipeline_and_for_each_micro_batch_without() -> None:
    piped = price(inputs_of(dp=16, pp=4, zero=np.array([1, 2]))).data_s
    assert piped[1] == piped[0]
    alone = price(inputs_of(dp=64, zero=np.array([1, 2]), schedule="none"), replace(GOOD, data_exposed=1.0)).data_s
    assert alone[1] > 4 * alone[0]  # Eight micro-batches: eight reductions and one gather, against one and one.


def test_zero_two_holds_whole_gradients_under_a_pipeline() -> None:
    piped = price(inputs_of(dp=16, pp=4, zero=np.array([1, 2]))).memory.split_bytes["gradients"]
    assert piped[1] == piped[0]
    alone = price(inputs_of(dp=64, zero=np.array([1, 2]), schedule="none")).memory.split_bytes["gradients"]
    assert alone[1] == pytest.approx(alone[0] / 64)


def test_zero_bubble_holds_more_than_1f1b_by_what_weight_gradients_wait_for() -> None:
    inputs = inputs_of(dp=8, pp=8, schedule=["1f1b", "zero-bubble"])
    per_layer, held = activations(inputs, GOOD), stages(inputs, GOOD)
    plain, split = (in_flight(inputs, GOOD, np.array([7.0])), weights_waiting(inputs, GOOD, np.array([7.0])))
    assert (plain[0], plain[1]) == (1, 1)
    assert (split[0], split[1]) == (0, 7)
    prices = price(inputs)
    tokens = SHAPE.sequence
    head = 7 * tokens * 2 * (SHAPE.vocab + SHAPE.hidden)
    last_layers = held.last[0] * (per_layer.kept[0] + 7 * per_layer.waiting[0])
    logits = GOOD.logit_bytes * 1.5 * tokens * SHAPE.vocab
    assert prices.memory.split_bytes["activations"][1] == pytest.approx(last_layers)
    assert prices.memory.split_bytes["logits"][1] == pytest.approx(logits + head)
    assert prices.memory_bytes[1] > prices.memory_bytes[0]


def test_inputs_that_weight_gradients_wait_for_are_32_bytes_a_number() -> None:
    # Qi et al. 2024, table 1: 32 s b h in a layer of plain attention and a feed-forward part of four times the width.
    found = activations(inputs_of(schedule="none"), GOOD).waiting[0]
    assert found == pytest.approx(32 * SHAPE.sequence * SHAPE.hidden, rel=1e-6)


@pytest.mark.parametrize(("position", "held", "waiting"), [(0, 15, 0), (3, 9, 6), (7, 1, 14)])
def test_zero_bubble_that_may_hold_twice_as_many(position: float, held: float, waiting: float) -> None:
    inputs, ahead = inputs_of(dp=8, pp=8, schedule="zero-bubble"), replace(GOOD, split_ahead=2.0)
    assert in_flight(inputs, ahead, np.array([position]))[0] == held
    assert weights_waiting(inputs, ahead, np.array([position]))[0] == waiting


def test_holding_twice_as_many_saves_time_and_costs_memory_in_zero_bubble_only() -> None:
    inputs, ahead = inputs_of(dp=8, pp=8, schedule=["zero-bubble", "1f1b"]), replace(GOOD, split_ahead=2.0)
    once, twice = price(inputs), price(inputs, ahead)
    assert twice.step_s[0] < once.step_s[0]
    first, double = (each.memory.split_bytes["activations"][0] for each in (once, twice))
    assert double > 1.7 * first
    assert (twice.step_s[1], twice.memory_bytes[1]) == (once.step_s[1], once.memory_bytes[1])


@pytest.mark.parametrize(
    ("framework", "schedule", "ahead"),
    [
        ("Megatron-LM (zero-bubble fork)", "zero-bubble", 2),
        ("Megatron-LM (zero-bubble fork)", "ZB-1p", 1),
        ("Megatron-LM", "zb-h1", 1),
        ("Megatron-LM", "ZB-2p", 2),
        ("Megatron-LM zero-bubble zb-h2", "zero-bubble", 2),
        ("Megatron-LM", "zero-bubble", 1),
        ("torchtitan", "ZBVZeroBubble", 1),
    ],
)
def test_names_of_zero_bubble_say_how_much_it_holds(framework: str, schedule: str, ahead: float) -> None:
    assert profile_for(framework, device="A100", precision="bf16", schedule=schedule).split_ahead == ahead


def test_a_rank_with_both_ends_of_a_v_has_both_tables() -> None:
    shape = replace(SHAPE, tied=False)
    turned, straight = (
        price(inputs_for(shape, PLACE, 512, dp=8, pp=8, schedule="zero-bubble", chunks=chunks)) for chunks in (2, 1)
    )
    table = SHAPE.vocab * SHAPE.hidden
    more = turned.memory.split_bytes["parameters"][0] - straight.memory.split_bytes["parameters"][0]
    assert more == pytest.approx(GOOD.parameter_bytes * table)


@pytest.mark.parametrize("zero", [0, 1])
def test_fp32_accumulation_adds_four_bytes_a_parameter_that_nobody_shards(zero: int) -> None:
    inputs = inputs_of(dp=8, pp=8, zero=zero, recompute="full")
    half, full = (profile_for("Megatron-DeepSpeed", device="A100", precision=each) for each in ("fp16", "bf16"))
    more = [price(inputs, each).memory.split_bytes["gradients"][0] for each in (half, full)]
    assert more[1] - more[0] == pytest.approx(4 * more[0] / half.gradient_held_bytes)
    assert more[0] / half.gradient_held_bytes > weights(inputs).layer_dense[0] * SHAPE.layers / 8


def test_fp32_accumulation_is_summed_whole_and_hides_nowhere() -> None:
    inputs = inputs_of(dp=8, pp=8, zero=1, recompute="full")
    half, full = (profile_for("Megatron-DeepSpeed", device="A100", precision=each) for each in ("fp16", "bf16"))
    # An all-reduce of four bytes and a gather of two, against a reduce-scatter and a gather of two each.
    alike = replace(half, data_hidden=0.0, shard_hidden=0.0, data_exposed=1.0)
    assert price(inputs, full).data_s[0] == pytest.approx(2.5 * price(inputs, alike).data_s[0], rel=0.1)


def test_gradients_of_16_bits_are_widened_after_the_activations_are_gone() -> None:
    inputs = inputs_of(tp=8, dp=8, schedule="none", recompute="full", micro_batch=np.array([1.0, 16.0]))
    plain, wider = (price(inputs, replace(GOOD, gradient_held_bytes=2.0, step_bytes=each)) for each in (0.0, 4.0))
    more, split = wider.memory_bytes - plain.memory_bytes, plain.memory.split_bytes
    assert more[0] == pytest.approx(2 * split["parameters"][0] - split["activations"][0] - split["logits"][0])
    assert more[1] == 0


def test_sequence_parallelism_gathers_the_input_in_work_and_a_gradient() -> None:
    cut = activations(inputs_of(tp=8, dp=8, sequence=True, schedule="none", recompute="full"), GOOD)
    bare = activations(inputs_of(tp=8, dp=8, sequence=True, schedule="none"), GOOD)
    assert bare.working[0] == pytest.approx(4 * SHAPE.sequence * SHAPE.hidden)
    assert cut.working[0] > bare.working[0]
    assert activations(inputs_of(tp=8, dp=8, schedule="none"), GOOD).working[0] == 0


def test_a_layer_that_waits_for_its_gather_takes_as_long_as_the_links() -> None:
    slow = cluster("cloud-10gbe", devices=64)
    inputs = inputs_for(SHAPE, slow, 64, dp=64, zero=3, schedule="none")
    none, some = (price(inputs, replace(GOOD, contention=each)).step_s[0] for each in (0.0, 0.5))
    assert some == pytest.approx(none, rel=1e-3)
    fast = inputs_for(SHAPE, PLACE, 512, dp=64, zero=3, micro_batch=8, schedule="none")
    none, some = (price(fast, replace(GOOD, contention=each)).step_s[0] for each in (0.0, 0.5))
    assert some > 1.005 * none
    alone = price(inputs, replace(GOOD, contention=0.0, unhidden=1.0))
    assert alone.step_s[0] > price(inputs, replace(GOOD, contention=0.0)).step_s[0]


def test_a_large_layer_that_is_recomputed_is_gathered_a_third_time_where_it_may_not_stay() -> None:
    deepspeed, columns = PROFILES["deepspeed"], {"dp": 64, "zero": 3, "schedule": "none"}
    huge = inputs_for(preset("gpt:175b"), PLACE, 64, **columns, recompute=["full", "none"])  # type: ignore[arg-type]
    layer = weights(huge).layer_dense[0]
    assert list(gathered_again(huge, deepspeed)) == [pytest.approx(1 - 1e9 / layer), 0]
    assert not gathered_again(inputs_of(**columns, recompute="full"), deepspeed).any()  # 3e8 parameters stay.
    assert not gathered_again(huge, PROFILES["usual"]).any()
    again, once = (price(huge, each).data_s[0] for each in (deepspeed, replace(deepspeed, live_parameters=0.0)))
    assert again > once


def test_hosts_of_old_devices_are_slower() -> None:
    new, old = (profile_for("Megatron-LM", device=each, precision="fp16") for each in ("A100", "V100 SXM2 32GB"))
    assert old.host_layer_s == pytest.approx(1.3 * new.host_layer_s)
