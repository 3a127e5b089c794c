"""Every axis and schedule trains exactly on an accelerator, with dropout too: held to a serial run on the CPU, in
float64.

All proofs of a number of ranks run in one start of them. Messages are carried in both ways that NCCL may carry them:
when both ranks have reached them, or as soon as they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).parents[1] / "distributed" / "jobs"
LANGUAGE, MOE = f"{JOBS / 'uneven.py'}:language", f"{JOBS / 'plain.py'}:moe"
DROPPING, NOISY, SGLD = (f"{JOBS / 'drops.py'}:{name}" for name in ("decoder", "noisy", "sgld"))
EXACT = 1e-10
STEPS = 2

CASES: dict[int, list[tuple[str, str]]] = {
    2: [
        (LANGUAGE, "dp(2)"),
        (LANGUAGE, "dp(2, zero=1)"),
        (LANGUAGE, "dp(2, zero=2)"),
        (LANGUAGE, "dp(2, zero=3)"),
        (LANGUAGE, "tp(2)"),
        (LANGUAGE, "tp(2, sequence=True)"),
        (LANGUAGE, "cp(2)"),
        (LANGUAGE, 'cp(2, "ulysses")'),
        (MOE, "ep(2)"),
        (LANGUAGE, 'pp(2, "gpipe", micro=4)'),
        (LANGUAGE, "pp(2, micro=4)"),
        (LANGUAGE, 'pp(2, "interleaved", micro=4, chunks=2)'),
        (LANGUAGE, 'pp(2, "zero-bubble", micro=4)'),
        (LANGUAGE, 'pp(2, "zero-bubble", micro=4, chunks=2)'),
        (LANGUAGE, 'dp(2, zero=1) * accumulate(2) * recompute("full")'),
        ("adagrad", "dp(2, zero=1)"),
        (DROPPING, 'pp(2, "zero-bubble", micro=6, chunks=3)'),
        (DROPPING, "dp(2, zero=3)"),
        (DROPPING, "tp(2)"),
        (DROPPING, "cp(2)"),
        (NOISY, "dp(2) * accumulate(2)"),
        (SGLD, "dp(2, zero=1)"),
    ],
    3: [
        (LANGUAGE, "cp(3)"),
        (LANGUAGE, "dp(3, zero=3)"),
        (LANGUAGE, "pp(3, micro=6)"),
    ],
    4: [
        (LANGUAGE, "pp(2, micro=4) * dp(2, zero=1)"),
        (LANGUAGE, "pp(2, micro=4) * tp(2)"),
        (LANGUAGE, "dp(2, zero=3) * cp(2)"),
        (MOE, "dp(2) * ep(2)"),
    ],
}
MORE: dict[int, list[tuple[str, str]]] = {
    2: [
        (DROPPING, 'pp(2, "1f1b", micro=3) * recompute("full")'),
        (DROPPING, 'pp(2, "interleaved", micro=4, chunks=3)'),
        (DROPPING, 'cp(2, "ulysses")'),
        (DROPPING, "tp(2, sequence=True)"),
        (DROPPING, "tp(2, batch=True)"),
        (SGLD, "tp(2)"),
        (NOISY, "pp(2, micro=2)"),
    ],
    3: [(DROPPING, 'pp(3, "zero-bubble", micro=4, chunks=2)'), (NOISY, "dp(3)"), (SGLD, "dp(3, zero=3)")],
    4: [
        (DROPPING, "cp(2) * tp(2, sequence=True)"),
        (DROPPING, "pp(2, micro=3) * cp(2)"),
        (DROPPING, 'pp(4, "gpipe", micro=3)'),
        (SGLD, "pp(2, micro=2) * dp(2, zero=3)"),
    ],
}
PIPELINES = [(job, text) for cases in CASES.values() for job, text in cases if "pp(" in text]


def require_exact(rows: list[list[dict[str, Any]]]) -> None:
    """Every rank within 1e-10 on the device's backend, its ledger as predicted, and every element compared."""
    for row in zip(*rows, strict=True):
        for rank in row:
            assert "refused" not in rank, rank
            assert rank["backend"] == "shoal-reefccl", rank["backend"]
            assert rank["difference"] <= EXACT, (rank["case"], rank["where"], rank["difference"])
            assert rank["ledger"] == [], (rank["case"], rank["ledger"])
        for kind, elements in row[0]["elements"].items():
            assert sum(rank["compared"].get(kind, 0) for rank in row) == elements, f"{row[0]['case']}: {kind}"


def prove(on_device: Callable[..., Any], cases: list[tuple[str, str]], ranks: int, messages: str) -> None:
    asked = {"cases": cases, "steps": STEPS}
    rows = on_device("distributed.proofs:prove_many", asked, ranks=ranks, environment={"REEF_P2P": messages})
    require_exact(rows)


@pytest.mark.parametrize("ranks", CASES)
def test_every_axis_trains_exactly_on_a_device(on_device: Callable[..., Any], ranks: int) -> None:
    prove(on_device, CASES[ranks], ranks, "rendezvous")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE)
def test_more_products_train_exactly_on_a_device(on_device: Callable[..., Any], ranks: int) -> None:
    prove(on_device, MORE[ranks], ranks, "rendezvous")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_pipelines_train_exactly_where_sends_do_not_wait(on_device: Callable[..., Any], ranks: int) -> None:
    prove(on_device, [case for case in CASES[ranks] if case in PIPELINES], ranks, "eager")


@pytest.mark.parametrize(
    ("messages", "ranks", "micro"),
    [
        ("rendezvous", 2, 4),
        pytest.param("eager", 2, 4, marks=pytest.mark.slow),
        *(pytest.param("rendezvous", 3, micro, marks=pytest.mark.slow) for micro in (1, 2, 3, 4)),
        pytest.param("eager", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_without_flush_trains_as_in_host_memory(
    on_device: Callable[..., Any], messages: str, ranks: int, micro: int
) -> None:
    strategy = f'pp({ranks}, "pipedream", micro={micro})'
    asked = {"job": f"{JOBS / 'odd.py'}:sgd", "strategy": strategy, "num_steps": 3}
    there = on_device("accelerator.targets:losses", asked, ranks=ranks, environment={"REEF_P2P": messages})
    here = on_device("accelerator.targets:losses", asked, ranks=ranks, environment={"SHOAL_BACKEND": "shoal"})
    assert there[0] == there[1] == pytest.approx(here[0], rel=EXACT)
