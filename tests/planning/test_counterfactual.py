"""What a plan says of a change is what a fresh plan with that change gives."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from shoal.cluster import cluster
from shoal.planning.counterfactual import changes, with_links
from shoal.planning.price import simulated
from shoal.planning.rank import Plan, make_plan, question_for
from shoal.shapes.presets import preset
from shoal.strategy import cp, ep, parse, pp, tp

ASKED = [
    ("gpt:13b", "dgx-a100", 32, 256),
    ("gpt2:medium", "cloud-10gbe", 8, 64),
    ("llama3:8b", "p4d", 64, 512),
    ("mixtral:8x7b", "dgx-h100", 64, 512),
    ("llama3:70b", "frontier", 128, 256),
]


@pytest.fixture(scope="module", params=ASKED, ids=lambda asked: asked[0])
def plan(request: pytest.FixtureRequest) -> Plan:
    name, place, devices, batch = request.param
    return make_plan(question_for(preset(name), cluster(place, devices=devices), global_batch=batch))


def best_score(plan: Plan, mask: np.ndarray, *, most: int = 1000) -> float:
    """Of these rows, with all pipelines simulated."""
    few = np.flatnonzero(mask)
    few = few[np.argsort(plan.score[few], kind="stable")[:most]]
    question, rows = plan.question, plan.priced.rows.rows(few)
    split_s = simulated(rows, shape=question.shape, cluster=question.cluster, profile=question.profile)
    return float((plan.score[few] * sum(split_s.values()) / plan.priced.step_s[few]).min())


def ratio(changed: Plan, plan: Plan) -> float:
    return float(changed.score[changed.best] / plan.score[plan.best])


@pytest.mark.long
def test_faster_links_gain_what_a_fresh_plan_gains(plan: Plan) -> None:
    told = {each.what: each for each in changes(plan)}
    question = plan.question
    checked = 0
    for level, where in enumerate(("intra-node", "inter-node")):
        said = told.get(f"twice the {where} bandwidth")
        if said is not None:
            fresh = make_plan(replace(question, cluster=with_links(question.cluster, 2.0, level=level)))
            assert said.ratio == pytest.approx(ratio(fresh, plan), rel=0.01)
            checked += 1
    assert checked


@pytest.mark.long
def test_more_devices_gain_what_a_fresh_plan_gains(plan: Plan) -> None:
    sizes = [each for each in changes(plan) if " devices)" in each.what]
    assert len(sizes) == 2
    for said in sizes:
        devices = int(said.what.split("(")[1].split(" ")[0].replace(",", ""))
        grown = re.search(r"a batch of ([\d,]+)", said.outcome)
        batch = int(grown.group(1).replace(",", "")) if grown else plan.question.global_batch
        question = replace(plan.question, cluster=plan.question.cluster.resized(devices), global_batch=batch)
        fresh = make_plan(question)
        assert said.ratio == pytest.approx(ratio(fresh, plan), rel=0.01)
        assert ("no gain" in said.outcome) is (said.ratio >= 1)


@pytest.mark.long
def test_another_degree_costs_what_the_best_fresh_row_of_it_costs(plan: Plan) -> None:
    """Out of memory only if every row of that degree is, by as much as the smallest of them misses."""
    best, rows = plan.best, plan.priced.rows
    fresh = make_plan(plan.question)
    terms = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    others = ("tp", "pp", "cp", "ep", "zero", "recompute", "compress")
    checked = 0
    for said in changes(plan):
        found = re.fullmatch(r"(tp|pp|cp|ep|zero) (\d+) -> (\d+)", said.what)
        if not found:
            continue
        axis, now, then = found.group(1), int(found.group(2)), int(found.group(3))
        assert int(getattr(rows, axis)[best]) == now
        mask = getattr(fresh.priced.rows, axis) == then
        for name in others:
            if name != axis:
                mask &= getattr(fresh.priced.rows, name) == getattr(rows, name)[best]
        if axis == "zero":
            mask &= fresh.priced.rows.outer == rows.outer[best]
        fits = mask & fresh.priced.fits
        if said.ratio is None:
            assert not fits.any()
            missing = (fresh.priced.memory_bytes[mask].min() - fresh.priced.limit_bytes) / 1e9
            assert said.outcome == f"out of memory by {missing:.1f} GB"
        else:
            assert said.ratio == pytest.approx(best_score(fresh, fits) / fresh.score[fresh.best], rel=0.002)
            if axis in terms and then > 1:
                assert parse(said.strategy).term(terms[axis]).n == then
        checked += 1
    assert checked


@pytest.mark.long
def test_nothing_is_called_out_of_memory_that_a_whole_search_would_fit() -> None:
    """17 nodes want 17 stages, which the choices of the best plans for 16 do not fit."""
    question = question_for(preset("llama3:70b"), cluster("frontier", devices=128), global_batch=256)
    said = next(each for each in changes(make_plan(question)) if each.what.startswith("one more node"))
    whole = make_plan(replace(question, cluster=question.cluster.resized(136)))
    assert ("out of memory" in said.outcome) is (whole.best is None)
