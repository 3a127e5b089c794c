"""Rankings, fronts, families, counterfactuals, steps to target, and what is said when nothing fits."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.cluster import cluster
from shoal.estimate.target import BadPilot, TargetCost, default_target, learn_target
from shoal.planning.candidates import of_strategies
from shoal.planning.counterfactual import changes, compression_overtakes, faster_links, other_degrees, what_would_fit
from shoal.planning.price import price_candidates
from shoal.planning.rank import cheapest, default_batch, families, make_plan, pareto, question_for
from shoal.planning.report import plan_report
from shoal.shapes.presets import preset
from shoal.strategy import is_legal, parse


@pytest.fixture(scope="module")
def plan():
    return make_plan(question_for(preset("gpt:13b"), cluster("dgx-a100", devices=32), global_batch=256))


def test_no_row_of_the_front_is_beaten_in_both(plan) -> None:
    front = pareto(plan)
    score, memory = plan.score, plan.priced.memory_bytes
    assert front[0] == plan.best
    for row in front:
        better = plan.priced.fits & (score <= score[row]) & (memory < memory[row] * (1 - 1e-9))
        assert not better.any()


def test_the_best_of_a_family_is_its_best(plan) -> None:
    found = families(plan)
    assert {"zero", "dp + tp", "3D (dp, tp, pp)", "hybrid shards"} <= set(found)
    assert next(iter(found.values())) == plan.best
    assert not plan.priced.fits[found["dp"]]
    assert plan.strategy(found["dp"]).term is not None
    assert str(plan.strategy(found["zero"])).startswith("dp(32, zero=")


def test_counterfactuals_name_what_changes(plan) -> None:
    told = {each.what: each for each in changes(plan)}
    for name in ("twice the intra-node bandwidth", "twice the inter-node bandwidth", "twice the devices (64 devices)"):
        assert told[name].ratio is not None
        assert told[name].ratio <= 1 + 1e-9
    assert 0.45 < told["twice the devices (64 devices)"].ratio < 0.7
    assert "one more node (40 devices)" in told
    zero = next(each for what, each in told.items() if what.startswith("zero") and what.endswith("0"))
    assert zero.ratio is None
    assert "out of memory by" in zero.outcome


def test_a_changed_degree_is_never_better_than_the_best(plan) -> None:
    ratios = [each.ratio for each in other_degrees(plan) if each.ratio is not None]
    assert ratios
    assert min(ratios) >= 1 - 1e-12


def test_the_bandwidth_at_which_compression_overtakes_is_where_the_best_plan_changes() -> None:
    from dataclasses import replace

    from shoal.planning.counterfactual import with_links

    question = question_for(preset("gpt2:medium"), cluster("cloud-10gbe", devices=8), global_batch=64)
    crossing = compression_overtakes(make_plan(question))
    assert crossing is not None
    gigabits = float(crossing.what.split("below ")[1].split(" ")[0])
    for factor, expected in ((0.8, True), (1.25, False)):
        changed = replace(question, cluster=with_links(question.cluster, factor * gigabits / 10, level=1))
        plan = make_plan(changed)
        assert ("compress" in str(plan.strategy(plan.best))) is expected


def test_faster_links_help_where_links_are_slow() -> None:
    fast, slow = (
        make_plan(question_for(preset("gpt:1.3b"), cluster(name, devices=16), global_batch=64, by="step"))
        for name in ("dgx-h100", "cloud-t4-10gbe")
    )
    assert min(each.ratio for each in faster_links(slow)) < min(each.ratio for each in faster_links(fast)) - 0.01


def test_ulysses_is_tried_and_wins_where_attention_is_too_short_to_hide_a_ring() -> None:
    better = {}
    for sequence in (2048, 65536):
        texts = [f"dp(2) * cp(8, {way}) * amp('bf16')" for way in ("'ring'", "'ulysses'")]
        rows = of_strategies([parse(text) for text in texts], global_batch=16)
        shape = preset("gpt:1.3b").at(sequence=sequence)
        place = cluster("dgx-a100", devices=16)
        ring, turned = price_candidates(rows, shape=shape, cluster=place, everything=True).step_s
        better[sequence] = bool(turned < ring)
    assert better == {2048: True, 65536: False}
    question = question_for(preset("gpt:1.3b"), cluster("cloud-10gbe", devices=16), global_batch=16)
    found = make_plan(question, simulate="nothing")
    best = found.strategy(families(found)["with cp"])
    assert "ulysses" in str(best)
    assert is_legal(best, world=16, facts=question.model_facts)


def test_nothing_fits_says_by_how_much_and_what_would() -> None:
    plan = make_plan(question_for(preset("gpt:175b"), cluster("dgx-a100", devices=8), global_batch=64))
    assert plan.best is None
    told = " ".join(what_would_fit(plan))
    missing = (plan.priced.memory_bytes.min() - plan.priced.limit_bytes) / 1e9
    assert f"misses by {missing:.1f} GB" in told
    assert "devices would do" in told
    assert "of memory would do" in told


def test_by_cost_fewer_devices_may_win() -> None:
    question = question_for(preset("gpt2:medium"), cluster("cloud-10gbe", devices=16), global_batch=64, by="cost")
    found = cheapest(question)
    assert found.question.cluster.devices < 16
    assert found.cost(found.best) <= make_plan(question).cost(make_plan(question).best)


def test_the_plan_report_is_plain_json(plan) -> None:
    import json

    told = json.loads(json.dumps(plan_report(plan, top=3, changes=changes(plan)), allow_nan=False))
    assert len(told["plans"]) == 3
    first = told["plans"][0]
    assert np.isclose(sum(first["split_s"].values()), first["step_s"])
    assert np.isclose(sum(first["memory_split_bytes"].values()), first["memory_bytes"])
    assert np.isclose(first["time_to_target_s"], first["step_s"] * first["steps_to_target"])


def test_an_estimate_has_the_prices_of_its_row(plan) -> None:
    found = plan.estimate(plan.best)
    assert found.strategy == str(plan.strategy(plan.best))
    assert found.world == 32
    assert sum(found.step_split.values()) == pytest.approx(found.step_s)
    assert sum(found.memory_split.values()) == pytest.approx(found.memory_bytes, abs=10)
    assert found.time_to_target_s == pytest.approx(found.step_s * found.steps_to_target)


def test_the_default_batch_lies_below_the_noise_scale_unless_devices_would_idle() -> None:
    target = TargetCost(samples=1e6, noise_batch=300)
    assert default_batch(target, devices=8) == 256
    assert default_batch(target, devices=16_384) == 2048


def test_steps_fall_with_the_batch_to_a_floor() -> None:
    target = TargetCost(samples=1e6, noise_batch=1000)
    assert target.steps(1) == pytest.approx(1e6, rel=2e-3)
    assert target.steps(1000) == pytest.approx(2000)
    assert target.steps(1e9) == pytest.approx(1000, rel=1e-3)
    assert target.steps(1000, compress="topk") > target.steps(1000)
    assert target.steps(1000, staleness=3) > target.steps(1000)
    assert target.steps(1000, local_steps=64) > target.steps(1000, local_steps=8) > target.steps(1000)


def test_pilot_runs_replace_the_defaults() -> None:
    truth = TargetCost(samples=5e5, noise_batch=300)
    rows = [{"batch": str(size), "steps": str(truth.steps(size))} for size in (32, 64, 256, 1024)]
    rows.append({"batch": "64", "steps": str(1.3 * truth.steps(64)), "compress": "topk(0.01)"})
    found = learn_target(rows, start=default_target(preset("gpt:1.3b")))
    assert found.samples == pytest.approx(5e5)
    assert found.noise_batch == pytest.approx(300)
    assert found.slowdowns["topk"] == pytest.approx(1.3)
    assert found.origins["samples"].startswith("pilot")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"batch": "x", "steps": "3"}],
        [{"batch": "3"}],
        [{"batch": "0", "steps": "1"}],
        [{"batch": "1", "steps": "10"}, {"batch": "2", "steps": "20"}],
    ],
)
def test_pilot_rows_that_tell_nothing_are_refused(rows) -> None:
    with pytest.raises(BadPilot):
        learn_target(rows, start=default_target(preset("gpt:1.3b")))


def test_compressions_that_did_not_reach_the_target_need_at_least_as_many_more_steps_as_they_were_given() -> None:
    from shoal.strategy import REGISTRY, CompressTerm

    slower = TargetCost(samples=1e6, noise_batch=1000).slowdowns
    terms = [term for term in REGISTRY.values() if issubclass(term, CompressTerm)]
    assert set(slower) == {term.__name__ for term in terms}
    assert slower.pop("none") == 1
    reached = {name for name in slower if slower[name] == 1}
    assert reached >= {"fp16", "int8", "qsgd", "ternary"}  # docs/compression.md
    assert reached == {name for name in slower if REGISTRY[name].reaches_target}
    assert all(slower[name] >= max(300 / 230, 1 + REGISTRY[name].within) for name in slower.keys() - reached)


def test_energy_and_money_are_hours_times_power_and_prices(plan) -> None:
    from dataclasses import replace

    from shoal.planning.rank import ranked

    best = plan.best
    hours = plan.time_s(best) / 3600 * 32
    assert plan.cost(best) == pytest.approx(hours)
    assert plan.energy_kwh(best) == pytest.approx(hours * 0.4)

    def asked(**more: float) -> float:
        return ranked(replace(plan.question, **more), plan.priced).cost(best)

    assert asked(price_an_hour=2.0) == pytest.approx(2 * hours)
    assert asked(price_a_kwh=0.25, watts=800) == pytest.approx(0.25 * 0.8 * hours)
    assert asked(price_an_hour=2.0, price_a_kwh=0.25) == pytest.approx((2 + 0.25 * 0.4) * hours)


def test_every_accelerator_that_presets_use_states_its_power() -> None:
    from shoal.cluster.presets import PRESETS

    assert all(cluster(name).device.watts for name in PRESETS)


def test_error_bars_are_those_of_the_validation_page(plan) -> None:
    from pathlib import Path

    from shoal.estimate.errors import MEMORY_ERROR, STEP_ERROR

    page = (Path(__file__).parents[2] / "docs" / "validation.md").read_text(encoding="utf-8").splitlines()
    steps = next(line for line in page if line.startswith("| all |")).split("|")
    memory = next(line for line in page if "each model size left out" in line).split("|")
    assert round(float(steps[4].strip(" *"))) == round(100 * STEP_ERROR)
    assert round(float(memory[4].strip(" *"))) == round(100 * MEMORY_ERROR)
    first = plan_report(plan, top=1, changes=[])["plans"][0]
    least_s, most_s = first["step_range_s"]
    assert least_s * (1 + STEP_ERROR) == pytest.approx(first["step_s"]) == pytest.approx(most_s * (1 - STEP_ERROR))


def test_a_plan_says_what_no_measured_step_stands_behind() -> None:
    def beyond(name: str, place: str, **more: object) -> set[str]:
        told = plan_report(
            make_plan(question_for(preset(name), cluster(place, devices=16), global_batch=64, **more)),
            top=50,
            changes=[],
        )
        for row in told["plans"]:
            assert ("its pipeline schedule" in row["unmeasured"]) is (
                '"zero-bubble"' in row["strategy"] or '"gpipe"' in row["strategy"]
            )
            assert any("context" in each for each in row["unmeasured"]) is ("cp(" in row["strategy"])
        return set.intersection(*(set(row["unmeasured"]) for row in told["plans"]))

    assert beyond("gpt:1.3b", "dgx-a100") == set()
    assert "steps on this device" in beyond("gpt:1.3b", "dgx-1-v100")
