"""Planes cut among ranks in estimates: computing falls, messages come on top, and plans contain what is legal."""

from __future__ import annotations

from functools import cache

import pytest

from estimate.machines import machine
from shoal.calibration.job_model import job_model
from shoal.estimate.plane_traffic import plane_calls
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.price import price_step
from shoal.estimate.traffic import Group
from shoal.job import load_job
from shoal.layout.spatial.grid import AxisCut, Grid, Move, Need
from shoal.layout.spatial.plan import PlaneEvent
from shoal.planning.here import plan_here, plane_cuts
from shoal.strategy import ModelFacts, parse, spatial


@cache
def images(world: int = 4) -> tuple[JobModel, ModelFacts]:
    return job_model(load_job("image:resnet:tiny"), planes=plane_cuts(world))


def test_ranks_share_the_work_on_planes_and_pay_for_messages() -> None:
    model, _ = images()
    split = {text: price_step(model, parse(text), machine(byte_s=1e-9)).step_split for text in ("serial", "spatial(4)")}
    assert split["serial"]["compute"] / 4 < split["spatial(4)"]["compute"] < split["serial"]["compute"] / 2
    assert split["serial"]["messages"] == 0
    assert split["spatial(4)"]["messages"] > 0


def test_plans_cut_planes_by_height_and_into_tiles() -> None:
    model, facts = images()
    ranked = plan_here(model, facts, machine(ranks=4), world=4).ranked
    cuts = {str(term) for strategy, _ in ranked if (term := strategy.term(spatial)) is not None}
    assert cuts == {"spatial(2)", "spatial(4)", 'spatial(4, "both")'}
    assert any(str(strategy) == "dp(2) * spatial(2)" for strategy, _ in ranked)


def test_a_text_has_no_plan_that_cuts_planes() -> None:
    model, facts = job_model(load_job("language:tiny"), planes=plane_cuts(2))
    assert not model.planes
    assert not any(strategy.term(spatial) for strategy, _ in plan_here(model, facts, machine(), world=2).ranked)


def test_planes_that_were_not_looked_at_have_no_estimate() -> None:
    with pytest.raises(ValueError, match=r"spatial\(3\): .* was not looked at with its planes cut into 3 x 1"):
        price_step(images()[0], parse("spatial(3)"), machine())


def halo(rows: int, *, learns: bool = True) -> PlaneEvent:
    """Of a plane of 8 x 5, 2 samples and 3 channels, on two ranks that need `rows` more each."""
    need = Need(AxisCut(2, 8), ((0, 4 + rows), (4 - rows, 8)), held=True)
    move = Move(0, (need, None), (AxisCut(2, 8), None))
    return PlaneEvent(at=1, module="", kind="move", shape=(2, 3, 8, 5), itemsize=4, learns=learns, move=move)


def test_a_halo_is_one_message_there_and_its_gradient_back() -> None:
    group, size = Group(axis="spatial", ranks=2), 2 * 3 * 5 * 4
    calls = list(plane_calls(halo(1), group, (2, 1), 0))
    assert calls == [
        ("spatial", phase, kind, size, 2) for phase in ("forward", "backward") for kind in ("send", "recv")
    ]
    assert len(list(plane_calls(halo(1, learns=False), group, (2, 1), 0))) == 2
    assert [call[3] for call in plane_calls(halo(2), group, (2, 1), 1)] == [2 * size] * 4
    assert list(plane_calls(halo(0), group, (2, 1), 0)) == []


def test_corners_of_tiles_come_from_the_rank_across() -> None:
    grid = Grid((2, 2))
    needs = (Need(AxisCut(2, 8), ((0, 5), (3, 8)), held=True), Need(AxisCut(3, 6), ((0, 4), (2, 6)), held=True))
    move = Move(0, needs, (AxisCut(2, 8), AxisCut(3, 6)))
    sent = {other: leaving for other, leaving, _ in move.messages(grid, 0)}
    assert sent == {1: ((0, 4), (2, 3)), 2: ((3, 4), (0, 3)), 3: ((3, 4), (2, 3))}
