"""Certificates that were false are refused or exact now, and correct proofs that failed pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from shoal.launch.failure import RankFailed
from shoal.proof.certify import EXACT, Certificate, verify
from shoal.proof.coupling import SamplesCoupled
from shoal.strategy import parse
from shoal.training.local import train_job

JOBS = Path(__file__).parent / "jobs" / "coupled.py"


def proof(job: str, strategy: str, *, steps: int = 3) -> Certificate:
    return verify(f"{JOBS}:{job}", parse(strategy), steps=steps)


@pytest.mark.parametrize(
    ("job", "strategy"),
    [
        ("info_nce_dropout", "dp(2)"),
        ("clip", "accumulate(2)"),
        ("centred_dropout", "dp(3)"),
        ("hand_norm", 'pp(2, "1f1b", micro=4)'),
        ("balanced", "dp(2, zero=3)"),
    ],
)
def test_a_proof_of_coupled_samples_is_refused_by_name(job: str, strategy: str) -> None:
    with pytest.raises(SamplesCoupled, match=r"splits the batch, but job 'coupled': the (model|loss) couples samples"):
        proof(job, strategy)


def test_a_count_with_a_gradient_is_refused_under_any_strategy() -> None:
    with pytest.raises(SamplesCoupled, match="the count requires a gradient"):
        proof("weighted", "dp(1)")


def test_ranks_refuse_a_count_with_a_gradient_by_themselves(ranks) -> None:  # type: ignore[no-untyped-def]
    arguments = {"job": f"{JOBS}:weighted", "strategy": "dp(1)", "num_steps": 1, "exact": False}
    with pytest.raises(RankFailed, match="the count requires a gradient"):
        ranks("shoal.proof.entry:parallel_run", arguments, ranks=1)


@pytest.mark.parametrize(
    ("job", "strategy"),
    [
        # Losses over the global batch: outputs are gathered; a batch of 2 leaves one of 3 ranks without samples.
        ("info_nce_batch", "dp(2, zero=3)"),
        ("info_nce_short", "dp(3)"),
        ("clip_batch", "dp(2, zero=1)"),
        ("weighted_batch", "dp(2)"),
        ("info_nce_batch", 'pp(2, "gpipe", micro=1) * dp(2)'),
        # Samples may be coupled where the batch stays in one piece.
        ("centred", 'pp(2, "gpipe", micro=1)'),
        # Complex parameters and buffers.
        ("complex", "dp(2)"),
        ("complex", "dp(3, zero=3)"),
        # What is rounded to float32 when a job is loaded, a model built or a sample read.
        ("from_numpy", "dp(1)"),
        ("from_numpy", 'pp(2, "1f1b", micro=4)'),
        ("numpy_data", "dp(2)"),
        # A causal mask of infinities as a buffer; a loss of shape [1]; an optimiser with a closure.
        ("masked", "dp(2)"),
        ("one_element", "dp(2)"),
        ("lbfgs", "dp(2)"),
        # Sparse gradients; state of a shape that only its size has in common with a parameter; a scheduler inside.
        ("sparse", "dp(2)"),
        ("by_rows", "dp(2)"),
        ("scheduled", "dp(2)"),
        # Dropout that no module declares.
        ("functional", "dp(2) * accumulate(2)"),
    ],
)
def test_a_proof_holds_against_the_full_batch_in_one_process(job: str, strategy: str) -> None:
    found = proof(job, strategy)
    assert found.passed, (found.worst, found.max_rel_diff, found.ledger_differences)
    assert found.max_rel_diff <= EXACT
    assert "each global batch at once" in found.serial


@pytest.mark.parametrize("strategy", ["dp(2) * ep(2)", pytest.param("ep(2)", marks=pytest.mark.slow)])
def test_a_loss_over_the_batch_is_exact_where_experts_are_cut(strategy: str) -> None:
    found = verify(f"{JOBS.with_name('contrastive_moe.py')}:contrastive", parse(strategy), steps=2)
    assert found.passed, (found.worst, found.max_rel_diff, found.ledger_differences)
    assert found.max_rel_diff <= EXACT


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_blocks_that_are_mixtures_are_counted_where_they_are_computed_again(mode: str) -> None:
    found = verify(f"{JOBS.with_name('moe.py')}:in_block", parse(f"ep(2) * recompute('{mode}')"), steps=3)
    assert found.passed, (found.worst, found.max_rel_diff, found.ledger_differences)


@pytest.mark.parametrize(
    ("job", "strategy", "parts", "why"),
    [
        ("info_nce_micro", "dp(3) * accumulate(2)", 6, "per micro-batch: the job declares its loss so"),
        ("centred_micro", "dp(2)", 2, "per micro-batch: the job declares its loss so"),
        ("counting", "accumulate(3)", 3, "per micro-batch: every forward changes level"),
    ],
)
def test_a_proof_per_micro_batch_names_it(job: str, strategy: str, parts: int, why: str) -> None:
    found = proof(job, strategy)
    assert found.passed, (found.worst, found.max_rel_diff)
    assert f"per micro-batch: the same {parts} parts of each batch" in found.serial
    assert any(note.startswith(why) for note in found.notes)


def test_a_certificate_says_what_was_compared_how_and_what_it_does_not_cover() -> None:
    found = proof("complex", "dp(2)")
    assert found.compared["parameter"] == found.compared["exp_avg"] == 6 * 6 + 6 * 6 + 6
    assert found.compared["buffer"] == 6
    assert found.compared["loss"] == found.steps == 3
    assert found.seed == 0
    assert 0 < max(found.conditioning.values()) < 1e-12
    assert "steps and samples beyond these" in found.not_covered
    assert found.ledger_verdict == "calls, messages and bytes of every collective equal their prediction"
    printed = " ".join(str(found).split())
    assert "compared with one process, plain PyTorch, float64, each global batch at once, 3 steps, seed 0" in printed
    for part in ("compared 78 elements of parameters", "the serial run moves by", "tolerance", "not covered"):
        assert part in printed, printed


def test_a_certificate_says_what_was_not_compared() -> None:
    assert proof("lbfgs", "dp(2)").ledger_verdict == "not compared"
    simulated = proof("info_nce_micro", "dp(2, sync=local(2))")
    assert "how far this training is from that of one process" in simulated.not_covered


@pytest.mark.parametrize(("times", "provable"), [(12, True), (24, False)])
def test_the_tolerance_follows_from_how_far_the_serial_run_moves(times: int, provable: bool) -> None:
    found = proof(f"chaotic_{times}", "dp(2)", steps=4)
    moves = max(found.conditioning.values())
    assert found.passed is provable, (found.max_rel_diff, found.tolerance, moves)
    if provable:
        assert found.max_rel_diff <= found.tolerance == max(EXACT, 100 * moves)
    else:
        assert any("cannot be proven at 4 steps: the serial run itself moves by" in note for note in found.notes)


@pytest.mark.parametrize("job", ["plain", "slow"])
def test_a_gradient_that_is_off_by_a_millionth_is_found_whatever_the_learning_rate(job: str) -> None:
    target = "distributed.faults:gradient_off_by_a_millionth"
    found = verify(f"{JOBS}:{job}", parse("dp(2)"), steps=3, target=target)
    assert not found.passed
    assert found.max_rel_diff > 1e-7 > found.tolerance
    assert proof(job, "dp(2)").passed


def test_a_buffer_that_the_job_declares_is_named_and_one_that_it_does_not_fails() -> None:
    found = proof("mean_seen_local", "dp(2)")
    assert found.passed, (found.worst, found.max_rel_diff)
    assert "buffer" not in found.compared
    declared = "declared difference: the job declares 'local' for the buffer seen (each replica keeps its own)"
    assert any(note.startswith(declared) for note in found.notes)
    found = proof("mean_seen", "dp(2)")
    assert not found.passed
    assert found.worst == "buffer seen"
    assert any("declare what replicas do with it: Job(buffers={'seen': 'average'})" in note for note in found.notes)


def test_a_step_that_counts_nothing_is_refused_in_a_sentence() -> None:
    with pytest.raises(RankFailed, match="the loss of step 1 counts nothing"):
        proof("counts_nothing", "dp(2)")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("job", "strategy"), [("lora", "tp(2)"), ("qwen", "cp(2)")])
def test_a_correct_strategy_passes_whatever_the_seed_and_a_millionth_too_much_fails(
    job: str, strategy: str, seed: int
) -> None:
    spec, asked = f"{JOBS.with_name('conditioned.py')}:{job}", {"overrides": {"seed": seed}, "steps": 5}
    found = verify(spec, parse(strategy), **asked)
    assert found.passed, (found.worst, found.max_rel_diff, found.tolerance, found.notes)
    wrong = verify(spec, parse(strategy), target="distributed.faults:gradient_off_by_a_millionth", **asked)
    assert not wrong.passed


@pytest.mark.parametrize("job", ["complex", "rare", "own_noise"])
def test_the_gate_checks_complex_parameters_rare_counts_and_optimisers_that_draw(job: str, tmp_path: Path) -> None:
    said: list[str] = []
    train_job(
        f"{JOBS}:{job}",
        "dp(2)",
        folder=tmp_path / "run",
        checkpoint_every=0,
        steps=1,
        on_message=lambda message: said.append(message.get("text", "")),
    )
    assert any("checking the strategy" in text for text in said)
    assert not [text for text in said if "was not checked" in text]
