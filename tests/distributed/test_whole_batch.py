"""Distributed L-BFGS: vectors in the pieces in which ranks hold the parameters, steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from distributed.jobs import whole_batch
from shoal.launch import RankFailed
from shoal.proof.certify import verify

Ranks = Callable[..., list[Any]]
JOB = f"{Path(whole_batch.__file__)}:"
WITHIN = 1e-9


def test_under_every_stage_of_zero_it_is_one_process(ranks: Ranks, tmp_path: Path) -> None:
    strategies = ["dp(2)", "dp(2, zero=1)", "dp(2, zero=2) * accumulate(2)", "dp(2, zero=3)"]
    cases = [(f"{JOB}JOB", text) for text in strategies] + [(f"{JOB}plain", "dp(2)")]
    asked = {"cases": cases, "steps": 3, "references": str(tmp_path)}
    for rank in ranks("distributed.proofs:prove_many", asked, ranks=2, timeout_s=120):
        for row in rank:
            assert row["difference"] <= WITHIN, row
            assert row["losses"] == pytest.approx(rank[-1]["losses"], rel=1e-8), row  # Those of torch.optim.LBFGS.


def test_dot_products_of_one_rank_alone_fail_the_proof() -> None:
    fault = "distributed.whole_batch_faults:own_products"
    assert not verify(f"{JOB}JOB", "dp(2, zero=1)", steps=2, target=fault).passed


def test_it_resumes_to_the_bit_and_under_another_stage(tmp_path: Path) -> None:
    def run(name: str, **options: Any) -> shoal.Run:
        return shoal.train(folder=str(tmp_path / name), gate=False, on_message=lambda message: None, **options)

    full = run("full", job=f"{JOB}JOB", strategy="dp(2, zero=1)", steps=4, checkpoint_every=2)
    half = str(tmp_path / "full" / "checkpoints" / "step-00000002")
    assert run("again", resume=half).losses[-2:] == full.losses[-2:]
    assert run("other", resume=half, strategy="dp(2, zero=3)").losses[-2:] == pytest.approx(full.losses[-2:], rel=1e-3)


def test_axes_that_cut_are_refused_by_name() -> None:
    with pytest.raises(RankFailed, match="ShardedLBFGS sums over ranks"):
        verify(f"{JOB}JOB", "tp(2)", steps=2)
