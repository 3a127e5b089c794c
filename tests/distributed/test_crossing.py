"""What crosses stage boundaries in models that were not written for it: the proof passes, or a sentence refuses.

Each of these models trained another model under pp, raised PyTorch's own errors, or was refused without need.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.job import load_job
from shoal.launch import run_ranks
from shoal.layout.chain import StageCutError
from shoal.layout.layout import layout_of
from shoal.proof.certify import EXACT
from shoal.training.local import train_job

JOBS = Path(__file__).parent / "jobs" / "crossing.py"
EVERYWHERE = (
    "one_tensor_three_times",
    "passed_on",
    "written_in_block",
    "written_behind",
    "slices",
    "hooked",
    "detached",
    "unused_argument",
    "checkpointed",
    "kept_buffer",
    "counter",
)
"""Models that can be cut before every block."""
IN_TWO = ("shared_block", "derived", "early", "views", "bank", "one_norm")
QUICK = ("one_tensor_three_times", "shared_block", "derived", "written_in_block", "hooked", "kept_buffer", "detached")
SCHEDULES = (
    "'gpipe', micro=3",
    "'interleaved', micro=4, chunks=2",
    "'zero-bubble', micro=4",
    "'zero-bubble', micro=3, chunks=2",
)


def prove(cases: list[tuple[str, str]], ranks: int) -> None:
    asked = {"cases": [(f"{JOBS}:{name}", text) for name, text in cases], "steps": 3}
    for rows in run_ranks("distributed.proofs:prove_many", asked, ranks=ranks, hang_after_s=60):
        for row in rows:
            assert "refused" not in row, row
            assert row["difference"] < EXACT, row
            assert not row["ledger"], row


@pytest.mark.timeout(300)
def test_two_stages_train_the_model_of_one_process() -> None:
    cases = [(name, "pp(2, '1f1b', micro=4)") for name in QUICK]
    cases.append(("tied_within", "pp(2, 'interleaved', micro=2, chunks=2)"))
    prove(cases, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_schedule_and_three_stages_train_the_model_of_one_process() -> None:
    checkpoints, counts = ("checkpointed",), ("counter",)
    for schedule in SCHEDULES:
        left_out = (checkpoints if "zero" in schedule else ()) + (counts if "chunks" in schedule else ())
        prove([(name, f"pp(2, {schedule})") for name in EVERYWHERE if name not in left_out], 2)
    prove([(name, "pp(2, '1f1b', micro=4)") for name in (*EVERYWHERE, *IN_TWO)], 2)
    prove([(name, "pp(3, '1f1b', micro=6)") for name in EVERYWHERE], 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tied_weights_are_summed_where_ranks_come_to_them_in_opposite_orders() -> None:
    prove([("tied_within", f"pp(2, {schedule})") for schedule in SCHEDULES], 2)
    interleaved = "pp(2, 'interleaved', micro=2, chunks=2)"
    prove([("tied_within", f"{interleaved} * dp(2{zero})") for zero in ("", ", zero=1", ", zero=2")], 4)


@pytest.mark.parametrize(
    ("model", "stages", "why"),
    [
        ("early", 4, "a result of add in Early is also used after it"),
        ("late_counter", 2, "lies between two uses of the buffer steps, which the forward changes"),
        ("one_norm", 3, r"blocks\.1 needs more than its arguments|lies between two uses of the buffer blocks\.0\.norm"),
    ],
)
def test_a_cut_that_would_train_another_model_is_refused(model: str, stages: int, why: str) -> None:
    with pytest.raises(StageCutError, match=why):
        layout_of(load_job(f"{JOBS}:{model}")).stages(stages)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("model", "strategy", "why"),
    [
        ("reentrant", "pp(2, '1f1b', micro=2)", "use use_reentrant=False there, or recompute"),
        pytest.param(
            "checkpointed", "pp(2, 'zero-bubble', micro=2)", "zero-bubble splits the backward", marks=pytest.mark.slow
        ),
        pytest.param(
            "counter",
            "pp(2, 'interleaved', micro=2, chunks=2)",
            "changes the buffer steps outside its blocks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_schedule_cannot_repeat_ends_in_a_sentence(model: str, strategy: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=why) as refusal:
        train_job(f"{JOBS}:{model}", strategy, folder=tmp_path, gate=False, hang_after_s=60)
    assert getattr(refusal.value, "for_user", True)
