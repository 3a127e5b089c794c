"""What trains exactly over Gloo trains exactly over Shoal's own backend: one list of strategies, both backends.

The list is put together from those of the other tests: every stage and level of ZeRO, every axis alone, and the
products that were drawn. `make test` proves a handful of it on each backend, the slow tests all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from distributed import test_axes, test_products, test_verify
from shoal.comm.group import BACKENDS
from shoal.launch import run_ranks
from shoal.proof.certify import EXACT
from shoal.strategy import parse

STEPS = 4
CARRIERS = ("shoal", "gloo")
QUICK = [
    ("language:tiny", "dp(2, zero=1)"),
    ("image:resnet:tiny", 'dp(2, zero=3) * recompute("full")'),
    (test_axes.spec_of("language"), 'pp(2, "zero-bubble", micro=4)'),
    (test_axes.spec_of("language"), "tp(2, sequence=True)"),
    (test_axes.spec_of("language"), 'cp(2, "ring")'),
    (test_axes.spec_of("moe"), "ep(2)"),
]
Case = tuple[str, str]


@cache
def all_cases() -> tuple[Case, ...]:
    """(job, strategy), each once."""
    axes = [
        (test_axes.spec_of(job), test_axes.text(axis, ranks))
        for job, axis, ranks in test_axes.LEGAL
        if job in ("language", "image", "moe")
    ]
    products = [(test_products.spec_of("language"), str(each)) for each in test_products.chosen("language")]
    return tuple(dict.fromkeys([*test_verify.COVERING, *test_verify.GRID, *axes, *products]))


def world_of(case: Case) -> int:
    return parse(case[1]).world


@pytest.fixture(scope="session")
def serial_runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Serial runs know nothing of backends: each is made once."""
    return str(tmp_path_factory.mktemp("serial"))


@cache
def rows(carrier: str, cases: tuple[Case, ...], folder: str) -> dict[Case, list[Any]] | Exception:
    """Case -> each rank's row; or why there are none, which is kept as well."""
    asked = {"cases": cases, "steps": STEPS, "references": folder}
    try:
        found = run_ranks(
            "distributed.proofs:prove_many",
            asked,
            ranks=world_of(cases[0]),
            hang_after_s=120,
            environment={"SHOAL_BACKEND": carrier},
        )
    except Exception as error:
        return error
    return dict(zip(cases, (list(row) for row in zip(*found, strict=True)), strict=True))


def require_exact(found: dict[Case, list[Any]] | Exception, carrier: str) -> None:
    assert not isinstance(found, Exception), found
    for case, row in found.items():
        for rank in row:
            assert rank["backend"] == BACKENDS[carrier]
            assert rank["difference"] <= EXACT == 1e-10, (case, rank["where"], rank["difference"])
            assert rank["ledger"] == [], case
        for kind, elements in row[0]["elements"].items():
            assert sum(rank["compared"].get(kind, 0) for rank in row) == elements, (case, kind)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_kind_of_strategy_trains_exactly_over_both_backends(carrier: str, serial_runs: str) -> None:
    require_exact(rows(carrier, tuple(QUICK), serial_runs), carrier)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_strategy_trains_exactly_over_both_backends(carrier: str, world: int, serial_runs: str) -> None:
    cases = tuple(case for case in all_cases() if world_of(case) == world)
    assert cases
    require_exact(rows(carrier, cases, serial_runs), carrier)
