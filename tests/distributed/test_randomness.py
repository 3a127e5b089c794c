"""Random numbers are those of the serial run under every strategy: proofs with dropout left on, no mask that appears
twice in a training run, optimisers that draw, and resume to the bit."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.training_targets import checkpoint_bytes, curve
from shoal.proof.certify import EXACT, verify
from shoal.strategy import IllegalStrategy, parse

Ranks = Callable[..., list[Any]]
HERE = Path(__file__).parent
DROPS, FAMILIES = HERE / "jobs" / "drops.py", HERE / "jobs" / "families.py"
TRAIN = "distributed.training_targets:train_and_tell_pid"

PROOFS: dict[int, list[tuple[str, str]]] = {
    2: [
        ("decoder", "dp(2)"),
        ("decoder", 'dp(2, zero=3) * recompute("full") * accumulate(3)'),
        ("decoder", 'pp(2, "1f1b", micro=3) * recompute("full")'),
        ("decoder", 'pp(2, "interleaved", micro=4, chunks=2) * recompute("selective")'),
        ("decoder", 'pp(2, "zero-bubble", micro=4)'),
        ("decoder", "tp(2)"),
        ("decoder", "tp(2, sequence=True)"),
        ("decoder", "tp(2, batch=True)"),
        ("decoder", "cp(2)"),
        ("decoder", 'cp(2, "ulysses")'),
        ("by_hand", "tp(2)"),
        ("encoder", 'tp(2) * recompute("full")'),
        ("sequence_first", "dp(2, zero=1) * accumulate(2)"),
        ("recurrent", "dp(2)"),
        ("noisy", "dp(2) * accumulate(2)"),
        ("distributed", "dp(2, zero=3) * accumulate(2)"),
        ("distributed", "tp(2)"),
        ("sgld", "dp(2)"),
        ("sgld", "tp(2)"),
        ("random_rates", "dp(2)"),
        ("rounding", "dp(2, zero=1)"),
        ("rounding", "tp(2)"),
    ],
    3: [("decoder", "dp(3, zero=2)"), ("sgld", "dp(3, zero=3)"), ("noisy", "dp(3)")],
    4: [("decoder", "cp(2) * tp(2, sequence=True)"), ("decoder", "pp(2, micro=2) * tp(2)")],
}
MORE: dict[int, list[tuple[str, str]]] = {
    2: [("encoder", "pp(2, micro=2)"), ("noisy", "pp(2, micro=2)"), ("sequence_first", "tp(2)"), ("by_hand", "dp(2)")],
    4: [
        ("decoder", 'cp(2, "ulysses") * tp(2)'),
        ("decoder", "dp(2) * cp(2)"),
        ("decoder", "dp(2, zero=1) * tp(2)"),
        ("decoder", "pp(2, micro=3) * cp(2)"),
        ("sgld", "pp(2, micro=2) * dp(2, zero=3)"),
        ("decoder", "cp(4)"),
        ("decoder", 'pp(4, "gpipe", micro=3)'),
        ("decoder", "tp(4)"),
    ],
    8: [("decoder", "pp(2, micro=2) * dp(2, zero=1) * tp(2)")],
}


def prove(ranks: Ranks, cases: list[tuple[str, str]], world: int) -> None:
    asked = [(job if ":" in job else f"{DROPS}:{job}", text) for job, text in cases]
    everyone = ranks("distributed.proofs:prove_many", {"cases": asked, "steps": 2}, ranks=world, timeout_s=200)
    for rows in zip(*everyone, strict=True):
        assert "refused" not in rows[0], rows[0]
        for row in rows:
            assert row["difference"] <= EXACT, (row["case"], row["where"])
            assert row["ledger"] == [], row["case"]


@pytest.mark.parametrize("world", PROOFS)
def test_proofs_pass_with_dropout_left_on(ranks: Ranks, world: int) -> None:
    prove(ranks, PROOFS[world], world)


@pytest.mark.slow
@pytest.mark.parametrize("world", MORE)
def test_more_proofs_pass_with_dropout_left_on(ranks: Ranks, world: int) -> None:
    prove(ranks, MORE[world], world)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face_models_keep_their_dropout_in_a_proof(ranks: Ranks) -> None:
    gpt2, bert = f"{FAMILIES}:gpt2_dropping", f"{FAMILIES}:bert_dropping"
    cases = [(gpt2, text) for text in ("dp(2)", "tp(2)", "pp(2, micro=3)", "cp(2)")]
    prove(ranks, [*cases, (bert, "tp(2)"), (bert, 'dp(2, zero=3) * recompute("full")')], 2)


def test_an_optimiser_that_draws_for_no_element_gets_all_parameters() -> None:
    with pytest.raises(IllegalStrategy, match="RandomRates couples parameters, and zero=1 gives each rank slices"):
        verify(f"{DROPS}:random_rates", parse("dp(2, zero=1)"), steps=1)


def test_a_draw_that_belongs_to_no_sample_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "shoal", "verify", f"{DROPS}:routed", "--strategy", "dp(2)", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "drop draws random numbers of shape [" in done.stderr
    assert "and how many depends on more than the number of samples: no serial run draws the same" in done.stderr


STRATEGIES = {
    2: [
        "dp(2)",
        "dp(2, zero=3)",
        'pp(2, "gpipe", micro=2)',
        'pp(2, "interleaved", micro=2, chunks=2)',
        'pp(2, "zero-bubble", micro=2)',
        'pp(2, "pipedream", micro=2)',
        "tp(2)",
        "tp(2, sequence=True)",
        "tp(2, batch=True)",
        "cp(2)",
        'cp(2, "ulysses")',
    ],
    4: ["pp(2, micro=2) * tp(2)", "cp(2) * tp(2)", "dp(2) * cp(2)"],
}


def faults_of(everyone: list[list[dict[str, Any]]], serial: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the draws of a run: masks that appear at two places, or differ where activations are
    replicated, or are not those of the serial run."""
    found: list[str] = []
    at: dict[str, set[tuple[str, int]]] = {}
    pieces: dict[tuple[str, int], set[tuple[str, int, int]]] = {}
    for row in itertools.chain.from_iterable(everyone):
        key = (row["place"], row["sample"])
        at.setdefault(row["bits"], set()).add(key)
        pieces.setdefault(key, set()).add((row["bits"], row["size"], row["kept"]))
    found += [f"one mask at {sorted(keys)}" for keys in at.values() if len(keys) > 1]
    expected = {(row["place"], row["sample"]): row for row in serial}
    if set(expected) != set(pieces):
        found.append(f"drawn at other places: {sorted(set(expected) ^ set(pieces))[:3]}")
    for key in set(expected) & set(pieces):
        row, held = expected[key], pieces[key]
        if sum(size for _, size, _ in held) != row["size"]:
            found.append(
                f"{key}: parts of {[size for _, size, _ in held]} elements where the serial run has {row['size']}"
            )
        elif sum(kept for _, _, kept in held) != row["kept"] or (
            len(held) == 1 and (row["bits"],) != next(iter(held))[:1]
        ):
            found.append(f"{key}: another mask than the serial run's")
    return found


@pytest.mark.parametrize("world", STRATEGIES)
def test_every_dropout_of_a_training_run_draws_another_mask(ranks: Ranks, world: int) -> None:
    target, job = "distributed.randomness_targets:drawn", f"{DROPS}:decoder"
    (serial,) = ranks(target, {"job": job, "strategies": ["dp(1)"]}, ranks=1)
    # 4 blocks of 4 draws and that of the embedding, 12 samples, 2 steps.
    assert len(serial[0]) == (4 * 4 + 1) * 12 * 2
    assert len({row["bits"] for row in serial[0]}) == len(serial[0])
    everyone = ranks(target, {"job": job, "strategies": STRATEGIES[world]}, ranks=world, timeout_s=120)
    for number, text in enumerate(STRATEGIES[world]):
        assert faults_of([rank[number] for rank in everyone], serial[0]) == [], text


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("one key for all places", "pp(2, micro=2)"),
        ("first part on every rank", "tp(2)"),
        ("first part on every rank", "cp(2)"),
    ],
)
def test_masks_that_repeat_are_found(ranks: Ranks, fault: str, strategy: str) -> None:
    target, job = "distributed.randomness_targets:drawn", f"{DROPS}:decoder"
    (serial,) = ranks(target, {"job": job, "strategies": ["dp(1)"]}, ranks=1)
    everyone = ranks(target, {"job": job, "strategies": [strategy], "fault": fault}, ranks=2)
    assert faults_of([rank[0] for rank in everyone], serial[0])


@pytest.mark.parametrize(("job", "strategy"), [("sgld", "dp(2, zero=1)"), ("sgld", "tp(2)"), ("rounding", "dp(2)")])
def test_a_run_that_draws_resumes_to_the_bit(ranks: Ranks, tmp_path: Path, job: str, strategy: str) -> None:
    def asked(name: str, steps: int, **more: Any) -> dict[str, Any]:
        common = {"job": f"{DROPS}:{job}", "strategy": strategy, "checkpoint_every": 3, "gate": False}
        return {**common, "folder": str(tmp_path / name), "steps": steps, **more}

    ranks(TRAIN, asked("undisturbed", 6), ranks=2)
    ranks(TRAIN, asked("resumed", 3), ranks=2)
    ranks(TRAIN, asked("resumed", 6, resume=str(tmp_path / "resumed")), ranks=2)
    assert checkpoint_bytes(tmp_path / "resumed", 6) == checkpoint_bytes(tmp_path / "undisturbed", 6)
    assert curve(tmp_path / "resumed") == curve(tmp_path / "undisturbed")


def test_resumed_under_another_strategy_masks_and_noise_go_on(ranks: Ranks, tmp_path: Path) -> None:
    def asked(name: str, strategy: str, steps: int, **more: Any) -> dict[str, Any]:
        common = {"job": f"{DROPS}:sgld", "strategy": strategy, "checkpoint_every": 3, "gate": False}
        return {**common, "folder": str(tmp_path / name), "steps": steps, **more}

    ranks(TRAIN, asked("dp", "dp(2)", 6), ranks=2)
    ranks(TRAIN, asked("moved", "dp(2)", 3), ranks=2)
    ranks(TRAIN, asked("moved", "tp(2)", 6, resume=str(tmp_path / "moved")), ranks=2)
    assert parse("tp(2)").world == 2
    assert [loss for _, loss in curve(tmp_path / "moved")] == pytest.approx(
        [loss for _, loss in curve(tmp_path / "dp")], rel=1e-4
    )
