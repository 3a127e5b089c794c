"""Compression on real ranks: all end with the same bits, nothing is lost, and the ledger holds what formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from comm.compressors import ALL, FEEDBACK, term_of
from shoal.comm.compress.method import Method
from shoal.comm.compress.traffic import joined
from shoal.comm.group import BACKENDS
from shoal.comm.ledger import ledger_of
from shoal.strategy.terms import compress as terms

Ranks = Callable[..., list[Any]]

Case = tuple[terms.CompressTerm, str, list[int], str]

SHAPES = [([33, 65], "float32"), ([33, 65], "float64"), ([1031, 1], "float64"), ([5, 5, 41], "float32")]
KINDS = ["zeros on one rank", "huge", "alike", "ranks of different size"]
ORDINARY: list[Case] = [(term, "", shape, dtype) for term in ALL for shape, dtype in SHAPES]
ODD: list[Case] = [(term, kind, [33, 65], "float32") for term in ALL for kind in KINDS]


def run(ranks: Ranks, number: int, cases: list[Case], **arguments: Any) -> list[list[dict[str, Any]]]:
    written = [[str(term), kind, shape, dtype] for term, kind, shape, dtype in cases]
    arguments = {"backend": BACKENDS["gloo"], "cases": written, **arguments}
    return ranks("distributed.compress_targets:reduce_and_account", arguments, ranks=number)


def predicted(case: Case, *, number: int, rank: int, step: int = 2) -> Any:
    term, _, shape, dtype = case
    calls = Method(term).sent_bytes(shape, 4 if dtype == "float32" else 8, number, step, rank=rank)
    if calls is None:
        return None
    return ledger_of([("all", "gradient", kind, payload, number) for kind, payload in calls]).to_json()


def check(ranks: Ranks, number: int, cases: list[Case], **arguments: Any) -> None:
    found = run(ranks, number, cases, **arguments)
    for at, case in enumerate(cases):
        each = [results[at] for results in found]
        assert len({result["digest"] for result in each}) == 1, f"{case}: ranks ended with different bits"
        assert all(result["by_hand"] for result in each), (
            f"{case}: not the sum of what each rank's codec makes of its part"
        )
        if isinstance(case[0], tuple(map(type, FEEDBACK))):
            assert max(result["roundings_apart"] for result in each) < 8 * number, f"{case}: something was lost"
        for rank, result in enumerate(each):
            expected = predicted(case, number=number, rank=rank)
            if expected is None:
                continue
            counted = result["ledger"]
            if arguments.get("backend") == BACKENDS["shoal"]:
                # Its all-reduce has several algorithms, whose messages and bytes differ.
                counted, expected = _without_sizes_of_all_reduce(counted), _without_sizes_of_all_reduce(expected)
            assert (case, counted) == (case, expected)


def _without_sizes_of_all_reduce(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "messages": 0, "bytes": 0} if row["kind"] == "all_reduce" else row for row in rows]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_ranks_end_alike_nothing_is_lost_and_the_ledger_is_the_formula(ranks: Ranks, number: int) -> None:
    check(ranks, number, ORDINARY)


def test_odd_gradients_end_alike_and_nothing_is_lost(ranks: Ranks) -> None:
    check(ranks, 3, ODD)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_same_over_our_own_links(ranks: Ranks, number: int) -> None:
    check(ranks, number, ORDINARY, backend=BACKENDS["shoal"])


def test_side_by_side_the_results_are_the_same_in_fewer_messages(ranks: Ranks) -> None:
    names = [str(term) for term in ALL]
    shapes = [[33, 65], [64, 31], [5, 5, 41]]
    found = ranks("distributed.compress_targets:side_by_side", {"terms": names, "shapes": shapes}, ranks=3)
    for rank, results in enumerate(found):
        for term, (same, apart, together) in zip(ALL, results, strict=True):
            assert same, f"{term}: side by side the result is another"
            calls = [Method(term).sent_bytes(shape, 4, 3, 0, rank=rank) for shape in shapes]
            if None in calls:
                assert sum(row["calls"] for row in together) == 2 < sum(row["calls"] for row in apart) == 6
                continue
            rows = [("all", "setup", kind, payload, 3) for kind, payload in joined(calls)]  # type: ignore[arg-type]
            assert _without_sizes_of_all_reduce(together) == _without_sizes_of_all_reduce(ledger_of(rows).to_json())
            assert 3 * sum(row["calls"] for row in together) == sum(row["calls"] for row in apart)


@pytest.mark.parametrize("number", [2, 3])
def test_an_overflow_on_one_rank_is_seen_by_all_and_leaves_no_trace(ranks: Ranks, number: int) -> None:
    names = [str(term) for term in ALL]
    found = ranks("distributed.compress_targets:one_rank_overflows", {"terms": names}, ranks=number)
    for results in found:
        assert dict(zip(names, results, strict=True)) == {name: [True, True] for name in names}


def test_what_a_merge_of_gtopk_drops_is_kept_by_who_dropped_it(ranks: Ranks) -> None:
    found = ranks("distributed.compress_targets:merge_that_the_tree_drops", ranks=4)
    assert [each["total"] for each in found] == [[0.0, 15.0]] * 4
    # Rank 0's own element is not in the result, and rank 1's was dropped by rank 0.
    assert [each["residual"] for each in found] == [[10.0, 9.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]


def test_powersgd_asks_all_ranks_the_same_query(ranks: Ranks) -> None:
    for error in ranks("distributed.compress_targets:low_rank_sum", ranks=3):
        assert error < 1e-12


@pytest.mark.parametrize("sizes", [[[3, 1], [0, 2], [5, 0]], [[0, 0]] * 3, [[1, 1]] * 3])
def test_unequal_payloads_arrive_whole_and_without_padding(ranks: Ranks, sizes: list[list[int]]) -> None:
    found = ranks("distributed.compress_targets:unequal_payloads", {"sizes": sizes}, ranks=3)
    whole = [[[value + 50 * rank for value in range(sizes[rank][at])] for rank in range(3)] for at in range(2)]
    for rank, told in enumerate(found):
        assert told["parts"] == whole
        assert told["bytes"] == ([2 * sum(sizes[rank])] if any(map(any, sizes)) else [])


@pytest.mark.parametrize("number", [2, 3])
def test_200_steps_come_near_the_common_optimum(ranks: Ranks, number: int) -> None:
    special = {
        "none()": (0.3, 1e-6),
        "fp16()": (0.3, 0.001),
        "int8()": (0.3, 0.01),
        "topk(0.1)": (0.2, 0.05),
        "mstopk(0.1)": (0.2, 0.05),
        "randomk(0.25)": (0.2, 0.05),
        "threshold(0.1)": (0.2, 0.05),
        "dgc(0.1)": (0.02, 0.3),
        "gtopk(0.1)": (0.2, 0.1),
        "hitopk(0.1)": (0.2, 0.05),
        "sketch(3, 400)": (0.2, 0.05),
        "powersgd(4)": (0.2, 0.05),
        "ternary()": (0.1, 0.15),
        # What is forgotten does not quite cancel where ranks want different things.
        "chunktopk(0.1)": (0.2, 0.15),
        "demo(0.1)": (0.2, 0.05),
    }
    named = {text.partition("(")[0] for text in special}
    usual = {str(term): (0.2, 0.05) for term in ALL if type(term).__name__ not in named}
    rates = {term_of(text): each for text, each in {**special, **usual}.items()}
    cases = [[str(term), rate] for term, (rate, _) in rates.items()]
    found = ranks("distributed.compress_targets:quadratic", {"cases": cases}, ranks=number)
    assert all(results == found[0] for results in found), "ranks came to different places"
    for (term, (_, band)), distance in zip(rates.items(), found[0], strict=True):
        assert (str(term), distance < band) == (str(term), True), f"{distance:.3g} of the way is left, {band} allowed"
