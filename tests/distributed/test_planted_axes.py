"""`verify` rejects wrong pipelines, tensors, rings and experts: each fault fails a proof that passes without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shoal.proof.certify import EXACT, Certificate, verify
from shoal.strategy import parse

FOLDER = Path(__file__).parent / "jobs"
HONEST = "shoal.proof.entry:parallel_run"
STEPS = 2
"""Few: a wrong gradient is still where it was made. With more steps it has spread, and the worst may lie anywhere."""
A_MISS = 1e-6
"""Ten thousand times the tolerance: no fault may be a near miss."""

FAULTS = [
    # fault, job, strategy, one of which the certificate must point at
    ("axis_faults:untied_stages", "uneven:language_unclipped", "pp(2, micro=4)", ("tokens.weight",)),
    ("axis_faults:untied_stages", "uneven:language_unclipped", 'pp(2, "zero-bubble", micro=2)', ("tokens.weight",)),
    ("axis_faults:untied_stages", "uneven:language_unclipped", "pp(2) * dp(2)", ("tokens.weight",)),
    ("axis_faults:untied_stages", "odd:tied", "pp(2, micro=4)", ("weight", "bias")),
    ("tensor_faults:untied", "uneven:language_unclipped", "tp(2)", ("tokens.weight",)),
    ("tensor_faults:unreduced_norm", "uneven:language", "tp(2, sequence=True)", ("norm",)),
    ("axis_faults:drops_a_micro_batch", "odd:plain", "pp(2, micro=4)", ("blocks.0", "blocks.1")),
    ("axis_faults:drops_a_micro_batch", "odd:plain", 'pp(2, "gpipe", micro=4)', ("blocks.0", "blocks.1")),
    ("axis_faults:drops_a_micro_batch", "odd:plain", "pp(2, micro=3) * dp(2, zero=2)", ("blocks.0", "blocks.1")),
    ("axis_faults:forgets_a_mask", "uneven:language", "cp(2)", ("blocks.",)),
    ("axis_faults:attends_to_the_future", "uneven:language", "cp(3)", ("blocks.",)),
    ("expert_faults:divides_experts_by_the_wrong_group", "plain:moe", "ep(2)", (".experts.",)),
    ("expert_faults:divides_experts_by_the_wrong_group", "plain:moe", "ep(2) * dp(2)", (".experts.",)),
    ("expert_faults:divides_experts_by_the_wrong_group", "uneven:mixtral", "ep(2)", (".experts.",)),
]


MORE = {
    ("uneven:language_unclipped", 'pp(2, "zero-bubble", micro=2)'),
    ("uneven:language_unclipped", "pp(2) * dp(2)"),
    ("odd:plain", 'pp(2, "gpipe", micro=4)'),
    ("plain:moe", "ep(2) * dp(2)"),
}
"""Cases of a fault that another case plants on the same axis; in `make test-all`."""


def _slow(rows: Iterable[tuple[Any, ...]], *, at: int) -> list[Any]:
    """Rows whose job and strategy, at this place, are of MORE are slow."""
    return [pytest.param(*row, marks=pytest.mark.slow) if row[at : at + 2] in MORE else row for row in rows]


@cache
def certificate(target: str, job: str, strategy: str) -> Certificate:
    if job == "uneven:mixtral" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    file, _, name = job.partition(":")
    return verify(f"{FOLDER / file}.py:{name}", parse(strategy), steps=STEPS, target=target)


@pytest.mark.parametrize(("job", "strategy"), _slow(sorted({row[1:3] for row in FAULTS}), at=0))
def test_without_a_fault_the_same_proof_passes(job: str, strategy: str) -> None:
    honest = certificate(HONEST, job, strategy)
    assert honest.passed, (honest.worst, honest.max_rel_diff, honest.ledger_differences)
    assert honest.ledger_matches
    assert honest.max_rel_diff <= EXACT


@pytest.mark.parametrize(("name", "job", "strategy", "where"), _slow(FAULTS, at=1), ids=lambda value: str(value))
def test_a_fault_in_an_axis_is_rejected_by_the_numbers(name: str, job: str, strategy: str, where: tuple[str]) -> None:
    found = certificate(f"distributed.{name}", job, strategy)
    assert not found.passed
    assert found.max_rel_diff > A_MISS
    assert any(part in found.worst for part in where), found.worst


def test_a_dropped_micro_batch_leaves_the_traffic_as_it_was() -> None:
    found = certificate("distributed.axis_faults:drops_a_micro_batch", "odd:plain", "pp(2, micro=4)")
    assert found.ledger_matches, found.ledger_differences


@pytest.mark.parametrize(
    ("name", "job", "strategy", "axis"),
    [
        ("out_of_regions", "uneven:language_unclipped", "tp(2)", "tp/forward/all_reduce"),
        ("attention", "uneven:language", "cp(2)", "cp/forward/send"),
        ("rows_of_experts", "plain:moe", "ep(2)", "ep/forward/all_to_all"),
        ("activations", "odd:plain", "pp(2, micro=4)", "pp/forward/send"),
    ],
)
def test_a_collective_that_is_neither_counted_nor_noted_is_rejected_by_the_ledger(
    name: str, job: str, strategy: str, axis: str
) -> None:
    """The numbers are right: only traffic that was predicted before the run can tell."""
    found = certificate(f"distributed.hidden_faults:{name}", job, strategy)
    assert not found.passed
    assert found.max_rel_diff <= EXACT
    assert any(axis in line for line in found.ledger_differences), found.ledger_differences


@pytest.mark.parametrize(
    ("name", "job", "strategy"),
    [
        ("gathers_twice", "users:recomputing", "dp(2, zero=3)"),
        ("gathers_twice", "users:layer_drop", "dp(2, zero=3) * accumulate(2)"),
        ("gathers_what_is_left_out", "users:layer_drop", "dp(2, zero=3) * accumulate(2)"),
    ],
)
def test_gathers_that_no_block_needs_are_rejected_by_the_ledger(name: str, job: str, strategy: str) -> None:
    """Also of a model that leaves out blocks at random: which ones it called is observed, not asked of the engine."""
    assert certificate(HONEST, job, strategy).passed
    found = certificate(f"distributed.hidden_faults:{name}", job, strategy)
    assert not found.passed
    assert found.max_rel_diff <= EXACT
    assert any("dp/backward/all_gather" in line for line in found.ledger_differences), found.ledger_differences
