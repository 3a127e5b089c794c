"""Offloaded state: the training of the serial run, in less memory by what was offloaded, and below a limit that the
state alone would break."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from distributed.jobs import offloaded
from shoal.launch import RankFailed
from shoal.parallel.runnable import NotRunnable, cannot_run
from shoal.proof.certify import EXACT, verify
from shoal.strategy import parse

Ranks = Callable[..., list[Any]]
JOB = f"{Path(offloaded.__file__)}:"
MEASURED = "distributed.offload_targets:train_measured"
EVERYTHING = 'offload("optimizer") * offload("parameters") * offload("activations")'
CASES = [
    ("JOB", 'dp(2) * offload("optimizer")'),
    ("JOB", 'dp(2, zero=1) * offload("optimizer") * accumulate(2)'),
    ("JOB", 'dp(2, zero=2) * offload("optimizer") * offload("activations")'),
    ("JOB", f"dp(2, zero=3) * {EVERYTHING}"),
    ("JOB", 'dp(2, zero=3) * offload("parameters")'),
    ("momentum", f"dp(2, zero=3) * {EVERYTHING}"),
    ("lamb", 'dp(2, zero=1) * offload("optimizer")'),
    ("JOB", f"tp(2) * {EVERYTHING}"),
    ("JOB", 'pp(2, micro=2) * offload("optimizer") * offload("parameters")'),
    ("large_activations", 'pp(2, "1f1b", micro=2) * offload("activations")'),
    ("large_activations", 'dp(2, zero=3) * offload("activations") * recompute("full")'),
]


def test_offloaded_training_is_the_serial_run(ranks: Ranks, tmp_path: Path) -> None:
    cases = [(JOB + name, text) for name, text in CASES]
    found = ranks("distributed.proofs:prove_many", {"cases": cases, "steps": 3}, ranks=2, timeout_s=150)
    for rank in found:
        for row in rank:
            assert "refused" not in row, row
            assert row["difference"] <= EXACT, row
            assert row["ledger"] == [], row


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("distributed.offload_faults:one_part_not_written_back", 'offload("optimizer")'),
        ("distributed.offload_faults:never_written_back", f"dp(2, zero=3) * {EVERYTHING}"),
        ("distributed.faults:clip_by_local_norm", 'dp(2, zero=1) * offload("optimizer")'),
    ],
)
def test_planted_faults_fail_the_proof(fault: str, strategy: str) -> None:
    assert not verify(JOB + "JOB", strategy, steps=3, target=fault).passed


def test_what_fits_no_memory_limit_trains_from_disk(ranks: Ranks) -> None:
    """The limit leaves room for the gradients and activations, and for half of AdamW's state: 86 MB."""
    room = {"more_bytes": 110_000_000, "steps": 3}
    with pytest.raises(RankFailed, match="memory"):
        ranks(MEASURED, {"strategy": "serial", **room}, ranks=1)
    (row,) = ranks(MEASURED, {"strategy": 'offload("optimizer")', **room}, ranks=1)
    assert row["state_bytes"] > 80_000_000
    (free,) = ranks(MEASURED, {"strategy": "serial", "steps": 3}, ranks=1)
    assert row["losses"] == pytest.approx(free["losses"], rel=1e-6)


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_peak_memory_falls_by_what_is_offloaded(ranks: Ranks, what: str, tmp_path: Path) -> None:
    # The root and two blocks are in use at once: of 40 blocks a twentieth.
    changes = {"width": 288, "depth": 40} if what == "parameters" else {}
    asked = {"changes": changes, "steps": 2, "save": str(tmp_path)}  # A checkpoint brings nothing back.
    (plain,) = ranks(MEASURED, {"strategy": "serial", **asked}, ranks=1)
    (less,) = ranks(MEASURED, {"strategy": f'offload("{what}")', **asked, "save": str(tmp_path / "less")}, ranks=1)
    row = less["offload"][what]
    assert row["held_bytes"] > 50_000_000
    assert row["in_use_bytes"] < 0.1 * row["held_bytes"]
    falls, below = plain["peak_bytes"] - less["peak_bytes"], row["held_bytes"]
    assert 0.9 * (below - row["in_use_bytes"]) < falls < 1.1 * below  # Not all that is in use is so at the peak.


def test_peak_memory_falls_by_the_activations(ranks: Ranks) -> None:
    changes = {"width": 128, "depth": 24, "batch": 4096}
    (plain,) = ranks(MEASURED, {"strategy": "serial", "changes": changes, "steps": 2}, ranks=1)
    (less,) = ranks(MEASURED, {"strategy": 'offload("activations")', "changes": changes, "steps": 2}, ranks=1)
    assert less["losses"] == plain["losses"]
    assert plain["peak_bytes"] - less["peak_bytes"] == pytest.approx(less["activations"], rel=0.1)


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> shoal.Run:
        return shoal.train(
            JOB + "JOB",
            f"dp(2, zero=3) * {EVERYTHING}",
            folder=tmp_path / folder,
            steps=6,
            gate=False,
            on_message=lambda message: None,
            checkpoint_every=3,
            **options,
        )

    full = run("full")
    assert full.losses[-1] < full.losses[0]
    again = shoal.train(
        resume=str(tmp_path / "full" / "checkpoints" / "step-00000003"),
        folder=str(tmp_path / "again"),
        gate=False,
        on_message=lambda message: None,
    )
    assert again.losses[-3:] == full.losses[-3:]
    for name, value in full.model().state_dict().items():
        assert torch.equal(value, again.model().state_dict()[name]), name
    # A checkpoint of an offloaded run goes on under another strategy.
    other = shoal.train(
        resume=str(tmp_path / "full" / "checkpoints" / "step-00000003"),
        strategy="serial",
        folder=str(tmp_path / "other"),
        gate=False,
        on_message=lambda message: None,
    )
    assert other.losses[-1] == pytest.approx(full.losses[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("job", "strategy", "said"),
    [
        ("sgd", 'offload("optimizer")', "SGD keeps 0 bytes of state"),
        ("JOB", 'offload("optimizer", to="host")', "0 bytes would move"),
        ("small", 'offload("activations")', "0 of them in tensors of at least"),
        ("shallow", 'offload("parameters")', "are in use at once"),
        ("counting", 'offload("optimizer")', "steps otherwise on one parameter"),
    ],
)
def test_where_there_is_nothing_to_gain_it_is_refused_with_the_figure(job: str, strategy: str, said: str) -> None:
    with pytest.raises((NotRunnable, RankFailed), match=said):
        verify(JOB + job, strategy, steps=2)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ('dp(2) * offload("parameters")', r"dp\(2, zero=3\)"),
        ('dp(2) * offload("gradients")', "none of them waits"),
        ('pp(2, "pipedream") * offload("optimizer")', "1f1b"),
        ('dp(2, via=ps(1)) * offload("optimizer")', "allreduce"),
        ('dp(2, sync=local(4)) * offload("parameters")', "islands"),
    ],
)
def test_what_does_not_compose_is_refused_by_name(strategy: str, said: str) -> None:
    reason = cannot_run(parse(strategy))
    assert reason is not None
    assert "offload(" in reason
    assert re.search(said, reason)
