"""Attention that asks for the whole width trains in parts on real ranks as it trains whole, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.job import load_job
from shoal.layout.layout import layout_of
from shoal.proof.certify import EXACT
from shoal.strategy import parse

Ranks = Callable[..., Any]

JOBS = Path(__file__).parent / "jobs" / "views.py"
CASES: dict[int, list[tuple[str, str]]] = {
    2: [
        ("masked", "tp(2)"),
        ("masked", "tp(2, sequence=True)"),
        ("masked", "tp(2) * recompute('full')"),
        ("flash", "tp(2)"),
        ("flash", "tp(2, sequence=True) * recompute('selective')"),
        ("at_once", "tp(2) * recompute('selective')"),
        ("at_once", "tp(2, sequence=True)"),
        ("beside_samples", "tp(2)"),
        ("beside_samples", "tp(2, sequence=True) * recompute('full')"),
    ],
    4: [
        ("masked", "tp(4)"),
        ("masked", "pp(2) * tp(2) * recompute('full')"),
        ("flash", "cp(2) * tp(2)"),
        ("masked", "dp(2, zero=3) * tp(2)"),
        ("flash", "pp(2, 'zero-bubble', micro=3) * tp(2, sequence=True)"),
    ],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", CASES)
def test_attention_that_names_the_whole_width_trains_exactly_in_parts(ranks: Ranks, world: int) -> None:
    cases = [(f"{JOBS}:{job}", strategy) for job, strategy in CASES[world]]
    for rows in ranks("distributed.proofs:prove_many", {"cases": cases, "steps": 3}, ranks=world):
        assert len(rows) == len(cases)
        for row in rows:
            assert "refused" not in row, row
            assert row["difference"] <= EXACT, (row["case"], row["where"])
            assert row["ledger"] == [], row["case"]


@pytest.mark.parametrize("job", ["masked", "flash", "at_once", "beside_samples"])
def test_every_layer_of_them_is_cut_by_heads(job: str) -> None:
    plan = layout_of(load_job(f"{JOBS}:{job}"), parse("tp(2)")).tensor
    assert plan is not None
    heads = [region for region in plan.regions if region.kind == "heads"]
    assert [region.columns for region in heads] == [(f"h.{n}.attn.c_attn",) for n in range(4)]
    assert {view.module for region in heads for view in region.views} == {f"h.{n}.attn" for n in range(4)}
    assert plan.sequence_dim == 1
