"""Products of axes train exactly as the serial run: what hypothesis draws from the legal set, not what we picked.

Three jobs that all their axes can cut (a GPT, a Llama with tied weights, a Mixtral), at 4 and 8 ranks, with every stage
of ZeRO, every exact schedule, recomputation and accumulation; and always `pp(2) * dp(2, zero=3) * tp(2)`. Serial runs
and draws are the same in every run of the tests. The first few run in `make test`, all of them in `make test-all`.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distributed.products import drawn, is_legal_for
from shoal.launch import run_ranks
from shoal.proof.certify import EXACT
from shoal.strategy import Strategy, contract, dp, parse, pp

HERE = Path(__file__).parent
QUICK_STEPS, STEPS = 6, 20
ALWAYS = parse("pp(2) * dp(2, zero=3) * tp(2)")
DRAWS = {"language": 12, "llama_tied": 10, "mixtral": 12}
"""How many products are drawn for each job, besides the one that is always there."""
QUICK = {"language": 2, "mixtral": 2}
"""How many of these `make test` proves."""


def spec_of(job: str) -> str:
    if job != "language" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return f"{HERE / 'jobs' / 'larger_batches.py'}:{job}"


@cache
def chosen(job: str) -> tuple[Strategy, ...]:
    """ALWAYS, and what was drawn."""
    found = drawn(spec_of(job), num=DRAWS[job], number=sum(map(ord, job)))
    return (ALWAYS, *(strategy for strategy in found if strategy != ALWAYS))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("references"))


@cache
def rows(job: str, world: int, quick: bool, folder: str) -> dict[Strategy, Any] | Exception:
    """Strategy -> each rank's row; or why there are none, which is kept as well."""
    first = 1 + QUICK.get(job, 0)
    some = [strategy for strategy in (chosen(job)[:first] if quick else chosen(job)) if strategy.world == world]
    asked = {"cases": [(spec_of(job), str(strategy)) for strategy in some], "references": folder}
    asked["steps"] = QUICK_STEPS if quick else STEPS
    try:
        found = run_ranks("distributed.proofs:prove_many", asked, ranks=world, hang_after_s=120)
    except Exception as error:
        return error
    return dict(zip(some, (list(row) for row in zip(*found, strict=True)), strict=True))


def prove(job: str, number: int, *, quick: bool, folder: str) -> None:
    if number >= len(chosen(job)):
        pytest.fail(f"only {len(chosen(job))} products of {job} were drawn: {', '.join(map(str, chosen(job)))}")
    strategy = chosen(job)[number]
    assert contract(strategy).kind == "exact"
    found = rows(job, strategy.world, quick, folder)
    assert not isinstance(found, Exception), found
    row = found[strategy]
    assert len(row) == strategy.world in (4, 8)
    for rank in row:
        assert "refused" not in rank, rank
        assert rank["difference"] <= EXACT == 1e-10, (rank["case"], rank["where"], rank["difference"])
        assert rank["ledger"] == [], rank["case"]
        assert len(rank["losses"]) == (QUICK_STEPS if quick else STEPS)
    for kind, elements in row[0]["elements"].items():
        assert sum(rank["compared"].get(kind, 0) for rank in row) == elements, f"{row[0]['case']}: {kind}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("job", "number"), [(job, n) for job, num in QUICK.items() for n in range(num + 1)])
def test_products_train_exactly_as_the_serial_run(job: str, number: int, references: str) -> None:
    prove(job, number, quick=True, folder=references)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("job", "number"), [(job, n) for job in DRAWS for n in range(QUICK.get(job, -1) + 1, DRAWS[job] + 1)]
)
def test_all_drawn_products_train_exactly_as_the_serial_run(job: str, number: int, references: str) -> None:
    prove(job, number, quick=False, folder=references)


@pytest.mark.parametrize("job", ["language", pytest.param("llama_tied", marks=pytest.mark.slow), "mixtral"])
def test_the_draw_is_legal_distinct_and_repeated_in_every_run(job: str) -> None:
    first = chosen(job)
    assert len(set(first)) == len(first) == DRAWS[job] + 1
    assert is_legal_for(spec_of(job), ALWAYS)
    drawn.cache_clear()
    assert (ALWAYS, *drawn(spec_of(job), num=DRAWS[job], number=sum(map(ord, job)))) == first


@pytest.mark.slow
def test_more_than_25_distinct_products_meet_every_axis_stage_and_schedule() -> None:
    every = {strategy for job in DRAWS for strategy in chosen(job)}
    assert len(every) >= 25
    assert ALWAYS in every
    assert {strategy.world for strategy in every} == {4, 8}
    classes = {type(term).__name__ for strategy in every for term in strategy.terms}
    assert {"dp", "pp", "tp", "cp", "ep", "recompute", "accumulate"} <= classes
    assert {term.zero for strategy in every for term in strategy.terms if isinstance(term, dp)} == {0, 1, 2, 3}
    assert len({strategy.term(pp).schedule for strategy in every if strategy.term(pp)}) == 4  # type: ignore[union-attr]
