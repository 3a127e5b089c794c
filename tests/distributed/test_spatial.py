"""Spatial parallelism on real ranks: exact, at the predicted traffic, for networks that nobody wrote to be cut,
and in products with dp, ZeRO, pp, tp and recompute. `tests/parallel/test_planes.py` has the grid of windows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.job import load_job
from shoal.layout.layout import facts_of, layout_of
from shoal.proof.certify import EXACT, Certificate, verify
from shoal.strategy import check, parse

JOBS = Path(__file__).parent / "jobs"
PLANES = JOBS / "planes.py"
STEPS = 3

TWO = [
    ("unet", "spatial(2)"),
    ("unet", "spatial(2, 'width')"),
    ("unet_bilinear", "spatial(2)"),
    ("mixture", "spatial(2)"),
    ("volume", "spatial(2)"),
    ("volume", "spatial(2, 'width')"),
    ("signal", "spatial(2)"),
    ("unet", "spatial(2) * recompute('full')"),
    ("unet", "spatial(2) * accumulate(2)"),
]
THREE = [("unet", "spatial(3)"), ("mixture", "spatial(3, 'width')"), ("volume", "spatial(3)")]
FOUR = [
    ("unet", "spatial(4)"),
    ("unet", "spatial(4, 'both')"),
    ("mixture", "spatial(4, 'both')"),
    ("unet", "dp(2) * spatial(2)"),
    ("unet", "dp(2, zero=3) * spatial(2)"),
    ("mixture", "dp(2, zero=1) * spatial(2)"),
    ("unet", "pp(2, '1f1b', micro=2) * spatial(2)"),
    ("pyramid", "pp(2, 'zero-bubble', micro=2) * spatial(2)"),
    ("unet", "tp(2) * spatial(2)"),
    ("unet", "dp(2) * spatial(2) * recompute('selective')"),
]
OF_OTHERS = [("resnet", "spatial(2)"), ("convnext", "spatial(2)")]


def prove(ranks: Callable[..., Any], cases: list[tuple[str, str]], *, world: int) -> None:
    asked = {"cases": [(f"{PLANES}:{job}", strategy) for job, strategy in cases], "steps": STEPS}
    for rank in ranks("distributed.proofs:prove_many", asked, ranks=world, timeout_s=240, hang_after_s=120):
        for row in rank:
            assert "refused" not in row, row
            assert row["difference"] < EXACT, row
            assert not row["ledger"], row


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (3, THREE), (4, FOUR)])
def test_planes_are_cut_exactly(ranks: Callable[..., Any], world: int, cases: list[tuple[str, str]]) -> None:
    prove(ranks, cases, world=world)


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_networks_of_other_people_are_cut_exactly(ranks: Callable[..., Any]) -> None:
    prove(ranks, OF_OTHERS, world=2)


FAULTS = ("shortens_halos", "drops_gradients_of_halos", "keeps_statistics_apart")


def certificate(target: str) -> Certificate:
    return verify(f"{PLANES}:unet", parse("spatial(2)"), steps=2, target=target)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected_by_the_numbers(fault: str) -> None:
    found = certificate(f"distributed.spatial_faults:{fault}")
    assert not found.passed
    assert found.max_rel_diff > 1e-6


@pytest.mark.parametrize(
    ("job", "strategy", "why"),
    [
        ("uneven:vit", "spatial(2)", "of the work on products lies on planes"),
        ("uneven:image", "spatial(2) * cp(2)", "planes cannot be cut together with cp"),
        ("planes:unet", "spatial(16)", "an image height of 13 cannot be cut among 16 ranks"),
        ("plain:lstm", "spatial(2)", "image planes"),
        ("uneven:language", "spatial(2)", "has no image planes to cut"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(job: str, strategy: str, why: str) -> None:
    file, _, name = job.partition(":")
    loaded = load_job(f"{JOBS / file}.py:{name}")
    found = check(parse(strategy), facts=facts_of(loaded, layout_of(loaded, parse(strategy))))
    assert any(why in refusal.reason for refusal in found), found
