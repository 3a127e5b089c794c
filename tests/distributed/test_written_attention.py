"""Context parallelism of attention in every spelling trains exactly as one process, at the traffic its formulas say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).parent / "jobs" / "written.py"
TOLERANCE = 1e-10

SPELLINGS = (
    "by_hand",
    "soft_capped",
    "alibi",
    "einsum",
    "own_mask",
    "learned_bias",
    "inline",
    "layer",
    "layer_weights",
    "layer_second",
)
MASKS = ("mask_padding", "mask_flat", "mask_both", "mask_causal", "mask_added", "mask_added_padding")


def prove(ranks: Callable[..., Any], jobs: tuple[str, ...], strategies: tuple[str, ...], *, world: int) -> None:
    cases = [(f"{JOBS}:{job}", strategy) for job in jobs for strategy in strategies]
    arguments = {"cases": cases, "steps": 2}
    rows = ranks("distributed.proofs:prove_many", arguments, ranks=world, timeout_s=240, hang_after_s=120)
    for rank in rows:
        for row in rank:
            assert "refused" not in row, row
            assert row["difference"] < TOLERANCE, row
            assert not row["ledger"], row


@pytest.mark.timeout(300)
def test_spellings_and_masks_are_exact_on_two_ranks(ranks: Callable[..., Any]) -> None:
    jobs = tuple(job for job in (*SPELLINGS, *MASKS) if job not in ("einsum", "mask_causal", "mask_added"))
    prove(ranks, jobs, ("cp(2, 'ring')",), world=2)


@pytest.mark.timeout(300)
def test_ulysses_and_recomputation_of_attention_written_by_hand(ranks: Callable[..., Any]) -> None:
    prove(ranks, ("alibi", "own_mask", "layer"), ("cp(2, 'ulysses')", "cp(2) * recompute('selective')"), world=2)


@pytest.mark.timeout(300)
def test_attention_written_by_hand_beside_other_axes(ranks: Callable[..., Any]) -> None:
    prove(ranks, ("by_hand", "layer"), ("cp(2) * tp(2)", "cp(2) * pp(2, micro=2)"), world=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["cp(3, 'ring')", "cp(3, 'ulysses')"])
def test_every_spelling_and_mask_is_exact_on_three_ranks(ranks: Callable[..., Any], strategy: str) -> None:
    # Four heads do not divide by three: what calls the library's attention cannot be exchanged by heads.
    jobs = (*SPELLINGS, *MASKS) if "ring" in strategy else ("by_hand", "soft_capped", "alibi", "einsum", "inline")
    prove(ranks, jobs, (strategy,), world=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["cp(2) * dp(2)", "cp(2) * dp(2, zero=3)", "cp(2) * tp(2, sequence=True)"])
def test_products_of_attention_written_by_hand(ranks: Callable[..., Any], strategy: str) -> None:
    prove(ranks, ("by_hand", "own_mask", "layer"), (strategy,), world=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_families_that_write_attention_out_are_exact(ranks: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    jobs = [f"{JOBS.with_name('eager.py')}:{name}" for name in ("gemma2", "bloom", "bert", "mpt", "gpt2")]
    arguments = {"cases": [(job, "cp(2)") for job in jobs], "steps": 2}
    for rank in ranks("distributed.proofs:prove_many", arguments, ranks=2, timeout_s=300, hang_after_s=120):
        for row in rank:
            assert "refused" not in row, row
            assert row["difference"] < TOLERANCE, row
            assert not row["ledger"], row
