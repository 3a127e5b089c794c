"""What a plan shows: plans that differ in kind, that fit at the end of their error range, and how fast they are."""

from __future__ import annotations

import pytest

from shoal.cluster import cluster
from shoal.planning import make_plan, question_for
from shoal.planning.rank import KIND, one_of_each
from shoal.planning.report import plan_report
from shoal.shapes.presets import preset
from shoal.strategy import parse


@pytest.fixture(scope="module")
def shown() -> dict:
    plan = make_plan(question_for(preset("gpt:13b"), cluster("dgx-a100", devices=64), global_batch=512))
    return plan_report(plan, top=10, changes=[]) | {"plan": plan}


def test_memory_fits_also_at_the_end_of_its_error_range(shown: dict) -> None:
    for row in shown["plans"]:
        assert row["memory_range_bytes"][1] <= shown["cluster"]["memory_bytes"] * (1 + 1e-9)


def test_plans_shown_differ_in_kind(shown: dict) -> None:
    plan = shown["plan"]
    rows = one_of_each(plan, 10)
    kinds = {tuple(int(getattr(plan.priced.rows, name)[row]) for name in KIND) for row in rows}
    swapped = {tuple(sorted(str(term) for term in parse(row["strategy"]).terms)) for row in shown["plans"]}
    assert len(swapped) == len(shown["plans"]) == 10
    assert len(kinds) > 3
    assert rows[0] == plan.ranked[0]


def test_speed_is_tokens_per_device_and_its_part_of_the_peak(shown: dict) -> None:
    shape, row = preset("gpt:13b"), shown["plans"][0]
    tokens = 512 * shape.sequence / row["step_s"] / 64
    assert row["tokens_per_s_per_device"] == pytest.approx(tokens)
    assert row["mfu"] == pytest.approx(tokens * 6 * shape.parameters / 312e12, rel=0.12)  # attention adds to it
    assert 0.2 < row["mfu"] < 0.8


def test_the_plan_names_the_engine_whose_memory_it_counts(shown: dict) -> None:
    assert any("Shoal's own amp keeps float32 weights" in line for line in shown["assumptions"])
