"""A job's step on a calibrated machine: what must hold of its price whatever the curves are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from estimate.machines import line, machine
from shoal.analysis.traced import traced_network
from shoal.calibration.job_model import job_model
from shoal.estimate.outer_calls import period
from shoal.estimate.steps.machine import Curve, Product
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.operations import PRODUCTS, operations
from shoal.estimate.steps.price import price_step
from shoal.estimate.target import local_slowdown
from shoal.job import load_job
from shoal.planning.here import legal_here, plan_here
from shoal.strategy import ModelFacts, is_legal, local, parse


def with_norms(model: JobModel, *, synchronised: bool) -> JobModel:
    return replace(model, shapes=replace(model.shapes, synchronised_norms=synchronised))


@cache
def model_of(name: str) -> tuple[JobModel, ModelFacts]:
    return job_model(load_job(name))


def step_s(name: str, strategy: str, **speeds: float) -> float:
    found = price_step(model_of(name)[0], parse(strategy), machine(**speeds)).step_s
    assert found is not None
    return found


def test_a_curve_is_what_was_measured_at_its_sizes_and_grows_between_and_beyond() -> None:
    curve = Curve((10.0, 100.0, 1000.0), (2.0, 5.0, 40.0))
    assert [curve.at(size) for size in (10, 100, 1000)] == pytest.approx([2.0, 5.0, 40.0])
    assert curve.at(1) == 2.0
    assert curve.at(2000) == pytest.approx(80.0)
    assert 5.0 < curve.at(300) < 40.0


def test_a_short_side_doubles_the_time_of_a_product() -> None:
    product = Product(start_s=0.0, flops=1e9, rows=8.0, columns=1e-9, inner=1e-9)
    assert product.seconds(1, 8, 64, 64) == pytest.approx(2 * 2 * 8 * 64 * 64 / 1e9)
    assert product.seconds(3, 8, 64, 64) == pytest.approx(3 * product.seconds(1, 8, 64, 64))


@pytest.mark.parametrize("name", ["language:tiny", "image:tiny", "image:resnet:tiny"])
def test_operations_do_the_work_that_the_analysis_counts(name: str) -> None:
    network = traced_network(load_job(name), batch=4)
    found = operations(network)
    for layer, operation in zip(network.layers, found, strict=True):
        if operation.kind in PRODUCTS and operation.kind != "attention" and "conv" not in operation.kind:
            work = operation.count * operation.rows * operation.columns * operation.inner
            assert work == layer.operator.forward().work
    assert {operation.of_samples(2.0).kept_bytes for operation in found} == {2 * each.kept_bytes for each in found}


@pytest.mark.parametrize("name", ["language:tiny", "image:tiny", "image:resnet:tiny"])
def test_two_replicas_take_half_the_time_of_one_where_messages_cost_nothing(name: str) -> None:
    model = with_norms(model_of(name)[0], synchronised=False)
    times = {
        text: price_step(model, parse(text), machine()).step_s for text in ("serial", "dp(2)", "dp(2) * accumulate(3)")
    }
    assert times["serial"] is not None
    assert times["dp(2)"] == pytest.approx(times["serial"] / 2, rel=0.01)
    assert times["dp(2) * accumulate(3)"] == pytest.approx(times["dp(2)"], rel=0.01)


def test_batch_norms_over_all_replicas_cost_more_than_their_own() -> None:
    model, _ = model_of("image:tiny")
    own, every = (
        price_step(with_norms(model, synchronised=each), parse("dp(2)"), machine()).step_s for each in (False, True)
    )
    assert own is not None
    assert every is not None
    assert own < every
    assert (
        step_s("image:tiny", "serial")
        == price_step(with_norms(model, synchronised=False), parse("serial"), machine()).step_s
    )


@pytest.mark.parametrize("name", ["language:tiny", "image:tiny"])
@pytest.mark.parametrize("strategy", ["dp(2)", "dp(2, zero=3) * accumulate(4)", 'pp(2, "1f1b", micro=4)'])
def test_slower_links_and_a_dearer_engine_never_help(name: str, strategy: str) -> None:
    times = [step_s(name, strategy, byte_s=byte_s) for byte_s in (1e-12, 1e-9, 1e-8)]
    assert times == sorted(times)
    assert times[0] < times[-1]
    dearer = [step_s(name, strategy, overhead_s=overhead_s) for overhead_s in (0.0, 1e-3)]
    assert dearer[0] < dearer[1]


def test_recomputation_repeats_blocks_but_not_what_ends_them() -> None:
    model, _ = model_of("language:tiny")
    again, plain = step_s("language:tiny", 'dp(2) * recompute("full")'), step_s("language:tiny", "dp(2)")
    forward_s = sum(each.of_samples(3).forward_s(machine()) for each in model.operations if each.piece in model.blocks)
    assert plain < again < plain + forward_s


def test_even_stages_idle_as_long_as_the_formula_says() -> None:
    """On a model of like blocks whose ends cost next to nothing."""
    model, _ = model_of("language:tiny")
    blocks = [piece.name for piece in model.pieces if piece.is_block]
    bare = replace(
        model,
        operations=tuple(each for each in model.operations if each.piece in blocks),
        shapes=replace(model.shapes, stages={2: ((0, 3), (3, len(model.pieces)))}),
    )
    for micro in (2, 4, 8):
        found = price_step(bare, parse(f'pp(2, "gpipe", micro={micro})'), machine())
        assert found.step_s is not None
        assert found.step_split["bubble"] / (found.step_split["bubble"] + found.step_split["compute"]) == pytest.approx(
            1 / (micro + 1), rel=0.02
        )


def test_what_tensor_parallelism_leaves_whole_is_computed_by_every_rank() -> None:
    model, _ = model_of("language:tiny")
    whole, cut, between = (
        price_step(model, parse(text), machine()).step_split["compute"]
        for text in ("serial", "tp(2)", "tp(2, sequence=True)")
    )
    assert whole / 2 < between < cut < whole


def test_shards_update_less_and_gather_more() -> None:
    slow = {**machine().updates, "AdamW": line(1e-8)}
    model, _ = model_of("language:tiny")
    split = {
        stage: price_step(model, parse(f"dp(2, zero={stage})"), replace(machine(byte_s=1e-9), updates=slow)).step_split
        for stage in (0, 1, 3)
    }
    assert split[1]["optimizer"] == pytest.approx(split[0]["optimizer"] / 2, rel=0.05)
    assert split[3]["data"] > split[1]["data"]


def test_memory_of_shards_and_of_recomputation() -> None:
    model, _ = model_of("language:tiny")

    def memory(text: str) -> int:
        found = price_step(model, parse(text), machine()).memory_bytes
        assert found is not None
        return found

    assert memory("dp(2, zero=3)") < memory("dp(2, zero=2)") < memory("dp(2, zero=1)") < memory("dp(2)")
    assert memory('dp(2) * recompute("full")') < memory("dp(2)")
    assert memory("dp(2) * accumulate(4)") < memory("dp(2)")


@pytest.mark.long
@pytest.mark.parametrize("name", ["language:tiny", "image:tiny"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_plan_is_legal_and_the_fastest_comes_first(name: str, world: int) -> None:
    model, facts = model_of(name)
    plan = plan_here(model, facts, machine(ranks=world), world=world)
    assert len(plan.ranked) == len({str(strategy) for strategy, _ in plan.ranked}) > 0
    assert all(is_legal(strategy, world=world, facts=facts) for strategy, _ in plan.ranked)
    times = [estimate.step_s for _, estimate in plan.ranked]
    assert times == sorted(times)


def test_local_steps_are_ranked_by_their_step_times_the_steps_they_add() -> None:
    model, facts = model_of("language:tiny")
    slow = machine(byte_s=1e-7)
    plan = plan_here(model, facts, slow, world=2, rules=[local(8)])
    loose = [strategy for strategy, _ in plan.ranked if period(strategy) > 1]
    assert loose
    assert next(strategy for strategy, _ in plan.ranked if "shared" not in str(strategy)) in loose
    scores = [estimate.step_s * local_slowdown(period(strategy)) for strategy, estimate in plan.ranked]
    assert scores == sorted(scores)
    assert not any(period(strategy) > 1 for strategy, _ in plan_here(model, facts, slow, world=2).ranked)


def test_more_ranks_than_were_calibrated_are_refused() -> None:
    """They would share cores, and look faster than they are."""
    model, facts = model_of("language:tiny")
    with pytest.raises(ValueError, match="calibrate --ranks 3"):
        plan_here(model, facts, machine(ranks=2), world=3)


def test_more_ranks_than_a_host_has_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 16"):
        list(legal_here(ModelFacts(), world=64))
