"""Optimisers that look at full parameters (Muon, LARS, LAMB, Shampoo, Adafactor) train exactly as one process where
ranks hold pieces, send what is predicted, and go on under another strategy."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shoal.launch import run_ranks
from shoal.parallel.runnable import NotRunnable, require_runnable
from shoal.proof.certify import EXACT, verify
from shoal.proof.compare import GRADIENT
from shoal.strategy import parse

JOBS = Path(__file__).parent / "jobs" / "layerwise.py"
STEPS, HALF = 4, 2

QUICK = [
    ("muon", "dp(2)"),
    ("muon", "dp(3, zero=1)"),
    ("muon", "dp(2, zero=3) * accumulate(2)"),
    ("muon", "tp(2)"),
    ("muon", "dp(2, zero=1) * tp(2)"),
    ("muon", "pp(2, micro=2)"),
    ("lamb", "dp(2, zero=3) * tp(2)"),
    ("lamb", "tp(3)"),
    ("shampoo", "dp(2, zero=2)"),
    ("lars", "dp(2, zero=1) * tp(2)"),
    ("unused", "dp(3, zero=1)"),
    ("moe", "ep(2)"),
    ("moe", "dp(2, zero=1) * ep(2)"),
    ("adafactor", "tp(2)"),
    ("adafactor", "dp(3, zero=3)"),
]
STRATEGIES = (
    "dp(2)",
    "dp(3, zero=1)",
    "dp(2, zero=2)",
    "dp(2, zero=3)",
    "tp(2)",
    "pp(2, micro=2)",
    "dp(2, zero=1) * tp(2)",
    "dp(2, via=shared())",
    "tp(2, sequence=True)",
    "dp(2, zero=3) * tp(2)",
    "dp(2) * dp(2, zero=1)",
    "pp(2, micro=2) * dp(2, zero=1)",
    "dp(2, zero=1) * cp(2)",
)
REST = [
    (job, strategy)
    for job in ("muon", "lars", "lamb", "shampoo", "adafactor")
    for strategy in STRATEGIES
    if (job, strategy) not in QUICK
]

PAIRS = [
    ("muon", "dp(2, zero=1) * tp(2)", "dp(3, zero=3)"),
    ("muon", "dp(3, zero=3)", "pp(2, micro=2)"),
    ("lamb", "pp(2, micro=2)", "dp(2, zero=1) * tp(2)"),
    ("shampoo", "tp(2)", "dp(3, zero=2)"),
    ("adafactor", "dp(3, zero=2)", "tp(2)"),
]


def spec(job: str) -> str:
    return f"{JOBS}:{job}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("full"))


@cache
def proven(ranks: int, quick: bool, folder: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    cases = [case for case in (QUICK if quick else REST) if parse(case[1]).world == ranks]
    asked = {"cases": [(spec(job), strategy) for job, strategy in cases], "steps": STEPS, "references": folder}
    found = run_ranks("distributed.proofs:prove_many", asked, ranks=ranks, hang_after_s=120)
    return dict(zip(cases, (list(row) for row in zip(*found, strict=True)), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("job", "strategy"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)])
def test_full_parameters_are_updated_exactly_where_ranks_hold_pieces(job: str, strategy: str, folder: str) -> None:
    row = proven(parse(strategy).world, (job, strategy) in QUICK, folder)[job, strategy]
    for rank in row:
        assert rank.get("difference", 1.0) <= EXACT == 1e-10, rank
        assert rank["ledger"] == [], rank["case"]
    for kind, elements in row[0]["elements"].items():
        assert sum(rank["compared"].get(kind, 0) for rank in row) == elements, f"{row[0]['case']}: {kind}"


@pytest.mark.timeout(300)
def test_state_of_full_parameters_goes_on_under_another_strategy(folder: str) -> None:
    first: dict[int, list[Any]] = defaultdict(list)
    second: dict[int, list[Any]] = defaultdict(list)
    for number, pair in enumerate(PAIRS):
        first[parse(pair[1]).world].append((number, pair))
        second[parse(pair[2]).world].append((number, pair))
    homes = [Path(folder) / f"pair-{number}" for number in range(len(PAIRS))]
    asked = {"cases": [(spec(pair[0]), pair[2]) for pair in PAIRS], "steps": STEPS, "folder": folder}
    references = run_ranks("distributed.reshard_targets:serial_many", asked, ranks=1)[0]
    for world, some in first.items():
        cases = [(spec(pair[0]), pair[1], str(homes[number])) for number, pair in some]
        run_ranks("distributed.reshard_targets:save_many", {"cases": cases, "steps": HALF}, ranks=world)
    for world, some in second.items():
        cases = [
            (spec(pair[0]), pair[2], str(homes[number] / f"step-{HALF:08d}"), references[number])
            for number, pair in some
        ]
        rows = run_ranks("distributed.reshard_targets:resume_many", {"cases": cases, "steps": STEPS}, ranks=world)
        for place, (number, pair) in enumerate(some):
            elements = json.loads(Path(references[number]).with_suffix(".json").read_text())["elements"]
            for row in rows:
                assert all(difference <= EXACT for difference, _ in row[place]["worst"]), (pair, row[place]["worst"])
            for kind, count in elements.items():
                if kind != GRADIENT:
                    assert sum(row[place]["compared"].get(kind, 0) for row in rows) == count, (pair, kind)


@pytest.mark.parametrize("strategy", ["dp(2, zero=1)", "tp(2)", "pp(2)", "dp(2, via=shared())"])
def test_optimizers_that_couple_parameters_are_refused_where_ranks_hold_pieces(strategy: str) -> None:
    require_runnable(parse(strategy))
    with pytest.raises(NotRunnable, match="needs all parameters together"):
        require_runnable(parse(strategy), coupled=True)


FAULTS = [
    ("update_not_sent", "muon", "dp(2, zero=1)"),
    ("update_of_the_wrong_owner", "shampoo", "dp(2, zero=3)"),
    ("pieces_in_the_wrong_order", "lamb", "tp(2)"),
]
"""The numbers give each away; with another owner the bytes may differ too."""
MORE_FAULTS = [
    (fault, job, strategy)
    for fault in ("update_not_sent", "update_of_the_wrong_owner", "pieces_in_the_wrong_order")
    for job in ("muon", "shampoo", "lamb")
    for strategy in ("dp(2, zero=1)", "dp(2, zero=3)", "tp(2)")
    if (fault, job, strategy) not in FAULTS
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "job", "strategy"), [*FAULTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_FAULTS)]
)
def test_a_wrong_update_of_a_full_parameter_is_rejected(fault: str, job: str, strategy: str) -> None:
    found = verify(spec(job), parse(strategy), steps=3, target=f"distributed.full_faults:{fault}")
    assert not found.passed
    assert found.max_rel_diff > 1e-6, found.worst
    assert found.ledger_matches or fault == "update_of_the_wrong_owner", found.ledger_differences
