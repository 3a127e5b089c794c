"""Pipelines of models that branch on data end in a sentence; the default nn.TransformerEncoder is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.training.local import train_job

JOBS = Path(__file__).parent / "jobs" / "branches.py"


@pytest.mark.timeout(120)
def test_a_tensor_more_at_a_stage_boundary_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="begins a stage") as refusal:
        train_job(f"{JOBS}:sometimes", "pp(2, micro=8)", folder=tmp_path, gate=False, hang_after_s=60)
    assert (
        "blocks.2 begins a stage, but for this micro-batch it is given 2 tensors instead of 1: the model branches on "
        "its data, which stages on other ranks cannot follow; put the branch inside one block, or leave pp out"
    ) in str(refusal.value)


@pytest.mark.timeout(120)
def test_an_encoder_that_packs_padding_is_evaluated_in_stages(tmp_path: Path) -> None:
    run = train_job(f"{JOBS}:padded", "pp(2, micro=2)", folder=tmp_path, gate=False, hang_after_s=60)
    assert run.status == "finished"
