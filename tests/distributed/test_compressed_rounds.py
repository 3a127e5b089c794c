"""Outer exchanges that are compressed: nothing is lost, the ledger is as predicted, and runs resume to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]
TARGETS = "distributed.round_targets"


def test_what_is_sent_and_what_is_kept_is_what_was_to_be_sent(ranks: Ranks) -> None:
    strategies = [
        "dp(2, sync=diloco(2, momentum=0.0), compress=topk(0.05))",
        "dp(2, sync=local(2), compress=sign())",
        "dp(2, sync=bmuf(3), compress=dgc(0.05))",
        "dp(2, sync=diloco(4, fragments=2), compress=topk(0.1))",
        "dp(2, sync=local(2), compress=powersgd(2))",
    ]
    for rows in ranks(f"{TARGETS}:compressed", {"strategies": strategies, "steps": 6}, ranks=2):
        for strategy, row in zip(strategies, rows, strict=True):
            assert row["rounds"] >= 2, strategy
            assert row["ledger"] == [], strategy
            assert row["off"] < 1e-12 or "dgc" in strategy, strategy


def test_sparseloco_forgets_a_part_of_what_it_keeps(ranks: Ranks) -> None:
    strategies = ["dp(2, sync=diloco(2, lr=1.0, momentum=0.0), compress=chunktopk(0.05, chunk=64, decay=0.9))"]
    asked = {"strategies": strategies, "steps": 6, "decay": 0.9}
    for [row] in ranks(f"{TARGETS}:compressed", asked, ranks=2):
        assert row["off"] < 1e-12
        assert row["ledger"] == []


@pytest.mark.parametrize("inner", ["dp(2, zero=3)", "dp(2, zero=1)", "tp(2)", 'pp(2, "1f1b", micro=2)'])
def test_islands_of_several_ranks_compress_their_slices(ranks: Ranks, inner: str) -> None:
    strategies = [f"dp(2, sync=diloco(2, fragments=2), compress=topk(0.05)) * {inner}"]
    for [row] in ranks(f"{TARGETS}:compressed", {"strategies": strategies, "steps": 5}, ranks=4):
        assert row["off"] < 1e-12
        assert row["ledger"] == []


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("dp(2, sync=diloco(4), compress=topk(0.05))", 2),
        ("dp(2, sync=local(3), compress=qsgd(4))", 2),
        ("dp(2, sync=diloco(4, fragments=2), compress=topk(0.05)) * dp(2, zero=1)", 4),
    ],
)
def test_what_was_not_sent_is_part_of_a_checkpoint(ranks: Ranks, tmp_path: Path, strategy: str, world: int) -> None:
    asked = {"job": "language:tiny", "strategy": strategy, "at": 5, "steps": 9, "folder": str(tmp_path)}
    for row in ranks("distributed.island_targets:resumed", asked, ranks=world):
        assert row["more"] == row["then"]
        assert row["same"]


def test_fragments_divide_the_largest_exchange(ranks: Ranks) -> None:
    strategies = ["dp(2, sync=diloco(4))", "dp(2, sync=diloco(4, fragments=2))"]
    one, two = ranks(f"{TARGETS}:sent_bytes", {"strategies": strategies, "steps": 8}, ranks=2)[0]
    assert one[:3] == [0, 0, 0]
    assert [size > 0 for size in two] == [False, True] * 4
    assert max(two) < 0.75 * max(one)
    assert abs(sum(two) - sum(one)) < 0.01 * sum(one)


def test_accumulation_that_saves_no_traffic_is_found(ranks: Ranks) -> None:
    asked = {"strategy": "dp(2, sync=diloco(3))", "steps": 7}
    assert ranks(f"{TARGETS}:prove_ledger", asked, ranks=2) == [[], []]
    assert all(ranks(f"{TARGETS}:saves_no_traffic", asked, ranks=2))


def test_the_state_of_the_outer_optimiser_is_part_of_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    asked = {"job": "plain", "strategy": "dp(2, sync=diloco(4))", "at": 6, "steps": 11, "folder": str(tmp_path)}
    rows = ranks(f"{TARGETS}:forgets_outer_momentum", asked, ranks=2)
    assert not any(row["same"] for row in rows)
