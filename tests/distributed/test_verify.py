"""`verify` passes for the built-in jobs, odd models and Hugging Face models, and keeps its word on the command line.

Odd models are proven many at a time, on ranks that are started once (`proofs.py`); the whole grid of the built-in
jobs is marked slow, a subset that meets every number of ranks, stage and modifier runs always.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distributed.proofs import JOBS
from shoal.launch import run_ranks
from shoal.proof.certify import EXACT, Certificate, verify
from shoal.strategy import parse

HERE = Path(__file__).parent
STEPS = 4

LATER = [
    ("language:tiny", "dp(3, zero=1)"),
    ("language:tiny", "dp(2) * dp(2, zero=3)"),
    ("image:tiny", "dp(2, zero=2)"),
    ("image:tiny", "dp(3, zero=3)"),
]
"""Their stages and levels are proven with other jobs in `make test`, with these in `make test-all`."""
COVERING = [
    ("language:tiny", "dp(2)"),
    ("language:tiny", "dp(4, zero=2) * accumulate(2)"),
    ("language:tiny", 'dp(2, zero=3) * recompute("full") * accumulate(3)'),
    ("language:tiny", "dp(2, zero=1) * dp(2)"),
    ("image:tiny", 'dp(4) * recompute("selective")'),
    ("image:tiny", "dp(2) * dp(2, zero=3)"),
    ("image:resnet:tiny", "dp(2, zero=1) * accumulate(2)"),
    ("image:resnet:tiny", 'dp(3, zero=3) * recompute("full")'),
    *LATER,
]
GRID = [
    (job, f"dp({ranks}, zero={zero})")
    for job in ("language:tiny", "image:tiny", "image:resnet:tiny")
    for ranks in (2, 3, 4)
    for zero in range(4)
]
ODD = [
    "plain",
    "sgd",
    "momentum",
    "decay",
    "rates",
    "adagrad",
    "rmsprop",
    "dropout",
    "tied",
    "unused",
    "frozen",
    "buffers",
    "one_linear",
    "repeated",
    "structures",
    "primes",
    "in_place",
    "loose",
    "recurrent",
    "sparse",
    "norm",
    "cumulative_norm",
    "frozen_norm",
    "short",
    "short_norm",
    "uneven",
    "uneven_norm",
    "late",
    "sometimes",
    "own_norms",
    "short_own_norms",
    "spectral",
    "replaced",
    "counting",
    "returning",
    "rare_inside",
    "tensor_rate",
]
MODIFIERS = ("", " * accumulate(2)", ' * recompute("full")', ' * recompute("selective") * accumulate(3)')


def odd_strategies(job: str, ranks: int) -> list[str]:
    """Every stage, each with another modifier; the job's place in ODD deals the modifiers differently."""
    turn = ODD.index(job)
    if ranks == 1:
        return ['dp(1, zero=3) * recompute("full")', "dp(1, zero=1) * accumulate(2)"]
    if ranks == 4:
        levels = ["dp(2) * dp(2, zero=3)", "dp(2, zero=1) * dp(2)", "dp(1) * dp(4, zero=2)", "dp(2) * dp(2)"]
        return [levels[turn % 4]]
    # More ranks than cores are slow: three ranks take two stages of each job, in turn.
    stages = range(4) if ranks == 2 else ((0, 2), (1, 3))[turn % 2]
    return [f"dp({ranks}, zero={zero}){MODIFIERS[(zero + turn // 2) % 4]}" for zero in stages]


def is_in_turn(job: str, ranks: int) -> bool:
    """Whether `make test` proves it: at 1 and 2 ranks every job, and each at 3 or at 4, so that every stage and level
    has its share."""
    return ranks <= 2 or (ODD.index(job) // 4) % 2 == ranks % 2


@cache
def odd_rows(ranks: int, quick: bool, folder: str) -> dict[str, list[list[dict[str, Any]]]] | Exception:
    """Job -> strategy -> rank -> row; or why there are none, which is cached as well."""
    jobs = [job for job in ODD if is_in_turn(job, ranks) == quick]
    cases = [(job, text) for job in jobs for text in odd_strategies(job, ranks)]
    try:
        asked = {"cases": cases, "steps": STEPS, "references": folder}
        found = run_ranks("distributed.proofs:prove_many", asked, ranks=ranks, hang_after_s=60)
    except Exception as error:
        return error
    rows: dict[str, list[list[dict[str, Any]]]] = {}
    for (job, _), row in zip(cases, zip(*found, strict=True), strict=True):
        rows.setdefault(job, []).append(list(row))
    return rows


def prove(job: str, strategy: str, *, steps: int = STEPS) -> Certificate:
    found = verify(job, parse(strategy), steps=steps)
    assert found.contract == "exact"
    assert EXACT == 1e-10 <= found.tolerance <= 1e-7
    assert found.ledger_matches, found.ledger_differences
    assert found.max_rel_diff <= EXACT, found.worst
    assert found.passed
    assert found.steps == steps == len(found.losses) == len(found.serial_losses)
    return found


@pytest.mark.parametrize(
    ("job", "strategy"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case in LATER else []) for case in COVERING],
)
def test_built_in_jobs_train_exactly_as_the_serial_run(job: str, strategy: str) -> None:
    found = prove(job, strategy)
    # Float32 tells less: the same runs differ by far more there.
    assert found.float32_drift is not None
    assert found.float32_drift > found.max_rel_diff


def test_factored_state_of_a_scalar_is_compared() -> None:
    found = prove(f"{HERE / 'jobs' / 'odd.py'}:scaled", "dp(2)")
    assert found.compared["variance"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(("job", "strategy"), GRID)
def test_built_in_jobs_train_exactly_over_the_whole_grid(job: str, strategy: str) -> None:
    prove(job, strategy, steps=6)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where serial runs are kept: all numbers of ranks are held to the same ones."""
    return str(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        pytest.param(job, ranks, marks=[] if is_in_turn(job, ranks) else pytest.mark.slow)
        for ranks in (1, 2, 3, 4)
        for job in ODD
    ],
)
def test_odd_models_train_exactly_as_the_serial_run(job: str, ranks: int, references: str) -> None:
    rows = odd_rows(ranks, is_in_turn(job, ranks), references)
    assert not isinstance(rows, Exception), rows
    for row in rows[job]:
        for rank in row:
            assert rank["difference"] <= EXACT, (rank["case"], rank["where"])
            assert rank["ledger"] == [], rank["case"]
        for kind, elements in row[0]["elements"].items():
            compared = sum(rank["compared"].get(kind, 0) for rank in row)
            assert compared == elements, f"{row[0]['case']}: {kind}"


def test_state_that_forwards_change_is_changed_once_in_a_pipeline() -> None:
    strategies = ("pp(2, '1f1b', micro=4)", "pp(2, 'gpipe', micro=2) * recompute('full')")
    asked = {"cases": [(job, text) for job in ("spectral", "counting") for text in strategies], "steps": STEPS}
    for rank in run_ranks("distributed.proofs:prove_many", asked, ranks=2, hang_after_s=60):
        for row in rank:
            assert row["difference"] <= EXACT, (row["case"], row["where"])
            assert row["ledger"] == [], row["case"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", "dp(2, zero=3)"),
        ("gpt2", "dp(3, zero=1) * accumulate(2)"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("llama", "dp(3, zero=1) * accumulate(2)"),
                ("gpt2", "dp(2, zero=3)"),
                ("vit", "dp(2, zero=3)"),
                ("vit", "dp(3, zero=1) * accumulate(2)"),
            ]
        ),
    ],
)
def test_hugging_face_models_train_exactly_as_the_serial_run(name: str, strategy: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    found = prove(f"{HERE / 'jobs' / 'huggingface.py'}:{name}", strategy, steps=3)
    if name == "llama":
        assert "LlamaRMSNorm" in found.widened, "its norms compute in float32 and must be named"


def test_elements_without_a_true_gradient_are_named_in_the_certificate() -> None:
    found = prove(f"{JOBS}:norm", "dp(2)")
    assert "features.0.bias" in found.zero_gradient


@pytest.mark.parametrize("strategy", ["dp(2)", "dp(2, zero=1)"])
def test_an_optimiser_of_full_parameters_is_exact_on_shards_too(strategy: str) -> None:
    prove(f"{JOBS}:trust", strategy)


def test_bfloat16_promises_a_band_and_keeps_it() -> None:
    found = verify("language:tiny", parse('dp(2, zero=1) * amp("bf16")'), steps=STEPS)
    assert found.contract.startswith("statistical")
    assert found.passed
    assert 0 < found.max_rel_diff <= found.tolerance < 0.1
    assert found.ledger_matches


def test_local_batch_norm_promises_a_band_only() -> None:
    found = verify(f"{JOBS}:local_image", parse("dp(2)"), steps=STEPS)
    assert found.contract.startswith("statistical")
    assert found.passed
    assert found.max_rel_diff > EXACT


def test_more_steps_do_not_drift_out_of_the_tolerance() -> None:
    prove("language:tiny", "dp(2, zero=1)", steps=40)


def test_a_proof_of_a_single_step_compares_the_ledger_too() -> None:
    assert prove("language:tiny", "dp(2)", steps=1).ledger_matches


def shoal(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_prints_one_json_object_and_ends_with_0() -> None:
    done = shoal("verify", "language:tiny", "--strategy", "dp(2, zero=1)", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"contract", "passed", "max_rel_diff", "tolerance", "worst", "ledger_matches", "steps"} <= set(found)
    assert found["contract"] == "exact"
    assert found["passed"] is True
    assert found["ledger_matches"] is True
    assert found["steps"] == 2
    assert 0 <= found["max_rel_diff"] <= found["tolerance"] == 1e-10


def test_the_command_ends_with_1_where_the_proof_fails() -> None:
    done = shoal("verify", str(HERE / "jobs" / "by_rank.py"), "--strategy", "dp(2)", "--steps", "2", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] is False
    assert found["max_rel_diff"] > 1e-4
    assert math.isfinite(found["max_rel_diff"])
    assert found["worst"]
    assert found["ledger_matches"] is True
