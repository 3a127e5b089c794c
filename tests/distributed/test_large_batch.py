"""Batches that grow, noise that is known, and replicas that come and go: the same samples in the same order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed.large_batch_targets import DIMENSIONS, DISTANCE, SPREAD

Run = Callable[..., list[Any]]
TARGETS = "distributed.large_batch_targets"
NOISE, SIGNAL = DIMENSIONS * SPREAD**2, DIMENSIONS * DISTANCE**2


@pytest.mark.parametrize(
    ("ranks_wanted", "strategies"),
    [
        (1, ["accumulate(4)", "serial"]),
        (2, ["dp(2)", "dp(2, zero=3) * accumulate(3)", "dp(2, zero=1)"]),
        (3, ["dp(3, zero=2)"]),
    ],
)
def test_noise_and_signal_of_a_known_problem_are_found(ranks: Run, ranks_wanted: int, strategies: list[str]) -> None:
    """An estimate of |G|^2 from one batch of 12 would be off by noise / 12, a tenth of the signal's size here."""
    found = ranks(f"{TARGETS}:noise", {"strategies": strategies, "steps": 600}, ranks=ranks_wanted)
    assert all(rank == found[0] for rank in found)
    for strategy, row in found[0].items():
        if strategy == "serial":
            assert row is None, "one small batch says nothing"
            continue
        noise, signal = row
        assert noise == pytest.approx(NOISE, rel=0.05), strategy
        assert signal == pytest.approx(SIGNAL, rel=0.06), strategy
        assert noise / signal == pytest.approx(NOISE / SIGNAL, rel=0.1)


def documented_order(seed: int, samples: int, epochs: int) -> list[int]:
    """Epoch e visits the samples in the order PCG64(SeedSequence([seed, e])).permutation."""
    found: list[int] = []
    for epoch in range(epochs):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
        found += generator.permutation(samples).tolist()
    return found


@pytest.mark.parametrize(
    "job",
    [
        {"samples": 250, "global_batch": 60, "last_batch": "short"},
        {"samples": 250, "global_batch": 60, "last_batch": "wrap"},
        {"samples": 390, "global_batch": 60, "last_batch": "short", "growth": [[200, 120], [700, 180]]},
    ],
    ids=["short last batch", "batches across epochs", "growth"],
)
def test_every_sample_is_seen_once_an_epoch_when_replicas_come_and_go(
    ranks: Run, job: dict[str, Any], tmp_path: Path
) -> None:
    """4 -> 3 -> 5 replicas across restarts: what ranks really fetch, rank by rank, is the documented order."""
    made: list[list[int]] = []
    resume, step = "", 0
    for replicas, steps in ((4, 3), (3, 4), (5, 6)):
        asked = {
            "job": job,
            "strategy": f"dp({replicas})",
            "steps": steps,
            "resume": resume,
            "folder": str(tmp_path),
        }
        found = ranks(f"{TARGETS}:fetch", asked, ranks=replicas)
        for number in range(steps):
            made.append([index for rank in found for micro in rank[number] for index in micro])
        step += steps
        resume = str(tmp_path / f"step-{step:08d}")
    seen = [index for batch in made for index in batch]
    samples = job["samples"]
    epochs = len(seen) // samples
    assert epochs >= 2
    assert seen == documented_order(0, samples, epochs + 1)[: len(seen)]
    for epoch in range(epochs):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    sizes = [len(batch) for batch in made]
    if "growth" in job:
        assert {60, 120, 180} <= set(sizes)
    elif job["last_batch"] == "short":
        assert sizes[:6] == [60, 60, 60, 60, 10, 60], "a batch ends where its epoch does"
    else:
        assert set(sizes) == {60}


def test_a_growing_batch_and_a_scaled_rate_train_exactly_and_send_what_is_predicted(ranks: Run) -> None:
    job = f"{Path(__file__).parent / 'jobs' / 'growing.py'}:language"
    strategies = ["dp(2, zero=1)", "tp(2)", "pp(2, micro=2)", "dp(2, zero=2) * accumulate(2)"]
    asked = {"cases": [(job, strategy) for strategy in strategies], "steps": 5}
    for rank in ranks("distributed.proofs:prove_many", asked, ranks=2):
        for row in rank:
            assert row["difference"] <= 1e-10, row
            assert row["ledger"] == [], row["case"]
