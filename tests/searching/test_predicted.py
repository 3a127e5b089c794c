"""Quality against predicted time and memory: machines from datasheets, the limit, the front, wide against narrow."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.calibration.job_model import job_model
from shoal.cluster import cluster
from shoal.estimate.steps.datasheet import machine_of_cluster
from shoal.estimate.steps.price import price_step
from shoal.job.load import load_job
from shoal.job.space import FixedTrial, load_space
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.predicted import place_of, predictor
from shoal.searching.proposal import centre
from shoal.searching.width import divide
from shoal.strategy import parse

SPACE = str(Path(__file__).with_name("line_space.py"))


def language(**values):
    """A point of the language space, from its middle."""
    space = load_space("language:small")
    _, dimensions = centre(space)
    point = {name: each.centre for name, each in dimensions.items()} | {"layers": 2, "hidden": 128} | values
    point |= {f"feed_forward{number}": "mlp" for number in range(1, 1 + point["layers"])}
    return space(FixedTrial(point))


def step_of(job, name: str, strategy: str = "serial"):
    parsed = parse(strategy)
    return price_step(job_model(job)[0], parsed, machine_of_cluster(cluster(name), world=parsed.world))


def test_a_larger_model_and_a_slower_device_take_longer():
    small, large = step_of(language(), "dgx-a100"), step_of(language(layers=6, hidden=384), "dgx-a100")
    assert large.step_s > 1.5 * small.step_s
    assert large.memory_bytes > 3 * small.memory_bytes
    wide = load_job("language:small")
    assert step_of(wide, "dgx-1-v100").step_s > 1.1 * step_of(wide, "dgx-h100").step_s


def test_messages_of_a_cluster_cost_by_its_links():
    wide = load_job("language:small")
    near, far = step_of(wide, "dgx-a100", "dp(8)"), step_of(wide, "dgx-a100", "dp(16)")
    gradients = 4 * 3.3e6
    assert near.step_split["data"] > 1.75 * gradients / 300e9
    assert far.step_split["data"] > near.step_split["data"]
    assert near.step_split["compute"] < step_of(wide, "dgx-a100").step_split["compute"]


def test_a_transformer_costs_about_what_the_planner_says():
    """Two models of one step: operators of a traced job here, layers of a shape there."""
    job = load_job("language:small")
    traced = step_of(job, "dgx-a100")
    planned = shoal.plan("language:small", cluster="dgx-a100", devices=1, precision="fp32")
    assert 0.4 < traced.step_s / planned.plans[0]["step_s"] < 2.5


def test_predictors_know_presets_and_refuse_what_they_cannot():
    options = SearchOptions(space="image", strategy="dp(2)", cluster="a100")
    step_s, memory_bytes = predictor(options)(centre(load_space("image"))[0])
    assert 1e-4 < step_s < 0.1
    assert 1e4 < memory_bytes < 1e8
    with pytest.raises(CannotSearch, match="has not been calibrated"):
        place_of("this", parse("serial"))
    with pytest.raises(CannotSearch, match="--cluster dgx-a101"):
        place_of("dgx-a101", parse("serial"))
    assert place_of("dgx-a100", parse("serial")).device_bytes == 85e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "pbt", "cluster": "dgx-a100"}, "looks at one objective; random, tpe, evolution weigh"),
        ({"memory_limit": "8 GB"}, "add cluster= NAME"),
        ({"cluster": "dgx-a100", "memory_limit": "8"}, "has no unit"),
        ({"cluster": "dgx-a100", "memory_limit": -1.0}, "more than nothing"),
    ],
)
def test_objectives_that_do_not_go_together_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError) as error:
        shoal.search(SPACE, folder=tmp_path, **options)
    assert message in str(error.value)


def test_few_wide_trials_or_many_narrow_ones():
    machine = machine_of_cluster(cluster("dgx-a100"), world=8)
    job = load_job("language:small")
    many = divide(job, devices=4, trials=12, machine=machine)
    assert (many.strategy.world, many.workers) == (1, 4)
    few = divide(job, devices=4, trials=1, machine=machine)
    assert few.workers == 1
    assert few.strategy.world == 4
    assert "each on 4 devices" in few.why


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_every_trained_model_is_predicted_to_fit(tmp_path):
    found = shoal.search(
        SPACE,
        method="random",
        trials=4,
        devices=1,
        strategy="serial",
        cluster="dgx-a100",
        memory_limit="500 B",
        steps=2,
        retrain=False,
        folder=tmp_path / "s",
    )
    memory = [row["predicted"]["memory_bytes"] for row in found.trials]
    assert len(memory) == 4
    assert max(memory) <= 500
    assert found.results["rejected"] > 0  # Some would not have fit.
    quality = [(row["value"], row["predicted"]["step_s"], row["predicted"]["memory_bytes"]) for row in found.front]
    assert quality
    for row in found.trials:  # No trial beats one of the front in everything.
        mine = (row["value"], row["predicted"]["step_s"], row["predicted"]["memory_bytes"])
        assert not any(all(a <= b for a, b in zip(mine, other, strict=True)) and mine != other for other in quality)
    assert found.page.exists()
