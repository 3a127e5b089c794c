"""What a plan shows of pipelines is what simulating them gives."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.cluster import cluster
from shoal.estimate.simulate import simulate_step
from shoal.planning.price import step_costs_of
from shoal.planning.rank import SHOWN, families, make_plan, pareto, question_for
from shoal.shapes.presets import preset


@pytest.mark.long
@pytest.mark.parametrize(("name", "where", "devices"), [("gpt2:medium", "dgx-a100", 16), ("gpt:13b", "lassen", 64)])
def test_all_rows_that_are_shown_have_the_time_of_the_play(name: str, where: str, devices: int) -> None:
    shape, place = preset(name), cluster(where, devices=devices)
    plan = make_plan(question_for(shape, place, global_batch=256))
    rows = plan.priced.rows
    shown = [*plan.ranked[:SHOWN], *pareto(plan), *families(plan).values()]
    shown = [row for row in dict.fromkeys(map(int, shown)) if plan.priced.fits[row] and rows.pp[row] > 1]
    assert shown
    for row in shown:
        one = rows.rows(np.array([row]))
        step_s = simulate_step(step_costs_of(one, shape=shape, cluster=place)).step_s
        assert plan.priced.step_s[row] == pytest.approx(step_s, rel=0.01), str(plan.strategy(row))
    parts = sum(plan.priced.split_s.values())
    assert np.allclose(parts[plan.ranked], plan.priced.step_s[plan.ranked])
    assert (np.diff(plan.score[plan.ranked]) >= 0).all()
