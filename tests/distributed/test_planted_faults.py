"""`verify` rejects wrong implementations: each planted fault fails the proof that the honest engine passes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from distributed.proofs import JOBS
from shoal.proof.certify import EXACT, Certificate, verify
from shoal.strategy import parse

HONEST = "shoal.proof.entry:parallel_run"
STEPS = 3

NUMBERS = [
    # fault, job, strategy, what the certificate must point at
    ("skipped_bucket", "plain", "dp(2)", ""),
    ("divides_by_one_rank_too_few", "momentum", "dp(2, zero=1)", ""),
    ("divides_by_one_rank_too_few", "plain", "dp(2)", "exp_avg"),
    ("divides_by_the_world_twice", "plain", "dp(2)", "exp_avg"),
    ("mean_of_means", "uneven", "dp(2)", ""),
    ("unreduced_norm", "plain", "dp(2)", "norm.weight"),
    ("misseeded_order", "plain", "dp(2)", ""),
    ("other_start_kept", "plain", "dp(2)", ""),
    ("clip_by_local_norm", "plain", "dp(2, zero=1)", ""),
    ("neighbours_shard", "plain", "dp(3, zero=2)", ""),
    ("only_the_last_micro_batch", "plain", "dp(2, zero=2) * accumulate(2)", ""),
    ("unpublished", "plain", "dp(2, zero=1)", ""),
    ("holds_a_part_only", "momentum", "dp(2, zero=1)", "elements are there to compare"),
    ("placeholder_counts", "short", "dp(3)", ""),
]
"""Faults that send what an honest run sends: the numbers give them away."""

LEDGER = [
    ("hidden_collective", "plain", "dp(2)", "world/optimizer/all_reduce: 1 calls"),
    ("collective_in_another_phase", "plain", "dp(2)", "world/setup/all_reduce: 1 calls"),
    ("uncounted_collective", "plain", "dp(2, zero=1)", "dp/gradient/reduce_scatter: 0 calls"),
]
"""Faults that leave the numbers right: the ledger gives them away."""


@cache
def certificate(target: str, job: str, strategy: str) -> Certificate:
    return verify(f"{JOBS}:{job}", parse(strategy), steps=STEPS, target=target)


def fault(name: str, *case: str) -> Certificate:
    return certificate(f"distributed.faults:{name}", *case)


@pytest.mark.parametrize(("job", "strategy"), sorted({row[1:3] for row in [*NUMBERS, *LEDGER]}))
def test_without_a_fault_the_same_proof_passes(job: str, strategy: str) -> None:
    honest = certificate(HONEST, job, strategy)
    assert honest.passed
    assert honest.ledger_matches
    assert honest.max_rel_diff <= EXACT


@pytest.mark.parametrize(("name", "job", "strategy", "where"), NUMBERS, ids=lambda value: str(value))
def test_a_fault_in_the_numbers_is_rejected(name: str, job: str, strategy: str, where: str) -> None:
    found = fault(name, job, strategy)
    assert not found.passed
    # Not a near miss: at least a hundred times the tolerance.
    assert found.max_rel_diff > 100 * EXACT
    assert where in found.worst
    assert found.ledger_matches, found.ledger_differences


@pytest.mark.parametrize(("name", "job", "strategy", "line"), LEDGER, ids=lambda value: str(value))
def test_a_fault_in_the_traffic_is_rejected_by_the_ledger_alone(name: str, job: str, strategy: str, line: str) -> None:
    found = fault(name, job, strategy)
    assert not found.passed
    assert not found.ledger_matches
    assert found.max_rel_diff <= EXACT
    assert any(line in difference for difference in found.ledger_differences), found.ledger_differences


def test_small_buckets_alone_are_no_fault() -> None:
    assert fault("honest_in_small_buckets", "plain", "dp(2)").passed


def test_a_skipped_bucket_leaves_the_others_right_and_is_named() -> None:
    worst = fault("skipped_bucket", "plain", "dp(2)").worst
    assert worst.startswith(("parameter", "exp_avg", "the gradient of")), worst


def test_a_rank_that_starts_elsewhere_is_put_right_by_rank_0() -> None:
    assert fault("other_start", "plain", "dp(2)").passed


def test_batch_norm_left_local_is_rejected_by_the_numbers_and_by_the_ledger() -> None:
    assert certificate(HONEST, "norm", "dp(2)").passed
    found = fault("norm_left_local", "norm", "dp(2)")
    assert not found.passed
    assert found.max_rel_diff > 100 * EXACT
    assert any("dp/forward/all_gather: 0 calls" in line for line in found.ledger_differences)


def test_uneven_token_counts_tell_a_mean_of_means_from_a_mean(request: Any) -> None:
    assert certificate(HONEST, "uneven_tokens", "dp(2)").passed
    assert not fault("mean_of_means", "uneven_tokens", "dp(2)").passed
