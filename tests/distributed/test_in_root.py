"""Context parallelism of models whose own forward works on the sequence: exact, at the traffic its formulas say; what
mixes positions outside attention is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.job import load_job
from shoal.layout.context.find import context_plan
from shoal.layout.context.plan import CannotCutSequence
from shoal.layout.layout import facts_of, layout_of
from shoal.layout.trace import trace
from shoal.strategy import check, parse

JOBS = Path(__file__).parent / "jobs" / "in_root.py"
TOLERANCE = 1e-10

VARIANTS = (
    "pre_norm",
    "post_norm",
    "parallel",
    "in_block",
    "functions",
    "capped",
    "alibi",
    "library",
    "multihead",
    "multihead_weights",
    "tied",
    "pooled",
    "patches",
    "dropping",
    "looped",
    "translation",
)


def prove(ranks: Callable[..., Any], jobs: tuple[str, ...], strategies: tuple[str, ...], *, world: int) -> None:
    cases = [(f"{JOBS}:{job}", strategy) for job in jobs for strategy in strategies]
    arguments = {"cases": cases, "steps": 2}
    rows = ranks("distributed.proofs:prove_many", arguments, ranks=world, timeout_s=240, hang_after_s=120)
    for rank in rows:
        for row in rank:
            assert "refused" not in row, row
            assert row["difference"] < TOLERANCE, row
            assert not row["ledger"], row


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_every_variant_is_exact_on_two_ranks(ranks: Callable[..., Any], method: str) -> None:
    prove(ranks, VARIANTS, (f"cp(2, '{method}')",), world=2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_every_variant_is_exact_on_three_ranks(ranks: Callable[..., Any], method: str) -> None:
    prove(ranks, VARIANTS, (f"cp(3, '{method}')",), world=3)


@pytest.mark.timeout(300)
def test_beside_recomputation_and_sharding(ranks: Callable[..., Any]) -> None:
    strategies = ("cp(2) * recompute('full')", "cp(2) * recompute('selective')")
    prove(ranks, ("pre_norm", "functions", "in_block", "tied", "dropping"), strategies, world=2)


@pytest.mark.timeout(300)
def test_beside_data_and_tensor_parallelism(ranks: Callable[..., Any]) -> None:
    prove(ranks, ("pre_norm", "pooled"), ("dp(2, zero=3) * cp(2)", "cp(2) * tp(2)"), world=4)
    prove(ranks, ("functions", "multihead", "tied"), ("cp(2) * tp(2)",), world=4)


@pytest.mark.parametrize(("name", "op"), [("shifted", "constant_pad_nd"), ("centred", "mean"), ("mixer", "mm")])
def test_what_mixes_positions_between_attentions_is_refused_by_name(name: str, op: str) -> None:
    with pytest.raises(CannotCutSequence, match=rf"\({op}\) mixes positions outside attention"):
        context_plan(trace(load_job(f"{JOBS}:{name}")))


def test_in_the_stages_of_a_pipeline_it_is_refused_by_name() -> None:
    job = load_job(f"{JOBS}:pre_norm")
    strategy = parse("pp(2, micro=2) * cp(2)")
    refusals = check(strategy, facts=facts_of(job, layout_of(job, strategy)))
    assert [refusal.rule for refusal in refusals] == ["cp-in-stages-needs-blocks"]
    assert "own forward works on the sequence" in refusals[0].reason
