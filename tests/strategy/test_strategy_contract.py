"""The contract follows from the terms and the workload, and the weakest term decides."""

from __future__ import annotations

import pytest
from hypothesis import given

from shoal.strategy import ModelFacts, Strategy, contract, dp, parse
from shoal.strategy.contract import KINDS
from strategy.strategies import strategies


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("serial", "exact"),
        ("dp(8)", "exact"),
        ("dp(8, zero=1)", "exact"),
        ("dp(8, zero=3) * dp(2)", "exact"),
        ("dp(4, via=ps(2))", "exact"),
        ("dp(4, sync=ssp(0))", "exact"),
        ('pp(4, "gpipe")', "exact"),
        ('pp(4, "zero-bubble", chunks=2)', "exact"),
        (
            'tp(2) * cp(2) * ep(2) * spatial(2) * recompute("full") * accumulate(4) * offload("optimizer")',
            "exact",
        ),
        ("dp(4, sync=ssp(3))", "bounded(3)"),
        ("dp(1, sync=ssp(3))", "exact"),
        ("dp(4, sync=softsync(2))", "bounded(4)"),
        ('pp(4, "pipedream")', "bounded(3)"),
        ('pp(1, "pipedream")', "exact"),
        ('pp(4, "pipedream", predict=True)', "bounded(3)"),
        ('dp(4, sync=ssp(3)) * pp(4, "pipedream")', "bounded(6)"),
        ('dp(4, sync=ssp(3)) * amp("bf16")', "statistical"),
        ("dp(4, sync=asp())", "statistical"),
        ("dp(4, sync=hogwild())", "statistical"),
        ("dp(4, sync=local(1))", "statistical"),
        ("dp(4, sync=diloco(50))", "statistical"),
        ("dp(4, sync=bmuf(50))", "statistical"),
        ("dp(4, sync=elastic(4, 0.1))", "statistical"),
        ('dp(4, sync=gossip("ring"))', "statistical"),
        ("dp(4, sync=bsp(backup=1))", "statistical"),
        ("dp(4, compress=fp16)", "statistical"),
        ("dp(4, compress=topk(0.1))", "statistical"),
        ("ensemble(3)", "statistical"),
        ('amp("bf16")', "statistical"),
    ],
)
def test_contracts_of_the_terms(text: str, expected: str) -> None:
    assert str(contract(parse(text))) == expected


@pytest.mark.parametrize(
    ("text", "facts", "expected", "reason"),
    [
        ("dp(2)", ModelFacts(batch_norm="local"), "statistical", "batch norm is local"),
        ("accumulate(2)", ModelFacts(batch_norm="local"), "exact", "accumulates the same 2"),
        ("dp(2) * accumulate(4)", ModelFacts(batch_norm="sync"), "exact", "accumulates the same 4"),
        ("pp(2, micro=6)", ModelFacts(batch_norm="sync"), "exact", "accumulates the same 6"),
        ("dp(2)", ModelFacts(batch_norm="sync"), "exact", "synchronised"),
        ("dp(2)", ModelFacts(dropout=True), "exact", "dropout"),
        ('dp(2) * recompute("full")', ModelFacts(dropout=True), "exact", "same dropout masks"),
        ("ep(2)", ModelFacts(expert_capacity=True), "statistical", "capacity"),
        ("tp(2)", ModelFacts(expert_capacity=True), "exact", "order of sums"),
        ("pp(2)", ModelFacts(tied=True), "exact", "tied"),
        ("dp(2, zero=1)", ModelFacts(clips=True), "exact", "norm is taken over"),
        ("dp(2) * accumulate(2)", ModelFacts(token_weighted=True), "exact", "global number of tokens"),
        ("dp(2, sync=ssp(0))", ModelFacts(), "exact", "ssp(0)"),
        ("dp(2, sync=local(1))", ModelFacts(), "statistical", "plain SGD"),
    ],
)
def test_the_workload_counts(text: str, facts: ModelFacts, expected: str, reason: str) -> None:
    found = contract(parse(text), facts)
    assert str(found) == expected
    assert any(reason in line for line in found.reasons), found.reasons


@given(strategies())
def test_the_weakest_term_decides(strategy: Strategy) -> None:
    whole = contract(strategy)
    kinds = [KINDS.index(contract(term).kind) for term in strategy.terms]
    assert KINDS.index(whole.kind) == max(kinds, default=0)
    assert whole.reasons
    assert whole.band
    assert {"exact": whole.staleness == 0, "statistical": whole.staleness is None}.get(whole.kind, whole.staleness)


def test_bands_say_what_is_compared() -> None:
    assert "1e-10" in contract(dp(2)).band
    assert "3 updates" in contract(parse("dp(4, sync=ssp(3))")).band
    assert contract(parse('amp("bf16")')).band == "loss within 5% of the float32 run"
    promised = contract(parse("dp(2, compress=topk(0.01))"))
    assert "within 15%" in promised.band
    assert promised.within == 0.15
    # The weakest promise holds for the whole.
    assert contract(parse('dp(2, compress=sign()) * amp("bf16")')).within == 0.3
