"""Experts dealt out over real ranks: outputs, gradients, statistics and traffic are those of the model in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.comm.wire import even_payload, sent

Ranks = Callable[..., list[Any]]
TARGETS = "distributed.expert_targets"
EXACT = 1e-12
LIBRARY = ("mixtral", "mixtral batched", "qwen3", "gpt_oss", "switch")
BY_HAND = ("by_hand", "capacity", "soft", "awkward", "pairs", "stacked", "weights apart")


def against_whole(ranks: Ranks, *cases: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What each rank found of each case, all of it as it should be."""
    found = ranks(f"{TARGETS}:against_whole", {"cases": cases}, ranks=len(cases[0]["shares"]))
    for case, rank in [(case, each) for of_rank in found for case, each in zip(cases, of_rank, strict=True)]:
        for what in ("output", "input", "experts", "others", "buffers"):
            assert rank[what] <= EXACT, (case, what, rank[what])
        assert rank["layers"], case
        assert rank["held"] == 1 / len(case["shares"]), case
        assert rank["wrongly"] == [], case
        assert rank["ledger"] == [], case
        assert rank["bytes"] > 0, case
    return found


def one(ranks: Ranks, model: str, shares: list[int], **options: Any) -> list[dict[str, Any]]:
    return [of_rank[0] for of_rank in against_whole(ranks, {"model": model, "shares": shares, **options})]


@pytest.mark.parametrize("model", BY_HAND)
def test_experts_on_two_ranks_compute_and_learn_as_in_one_place(ranks: Ranks, model: str) -> None:
    one(ranks, model, [3, 2])


def test_experts_of_a_librarys_models_compute_and_learn_as_in_one_place(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    cases = [{"model": model, "shares": [3, 2]} for model in LIBRARY]
    again = [{"model": "mixtral", "shares": [2, 3], "recompute": mode} for mode in ("full", "selective")]
    against_whole(ranks, *cases, *again)


def test_a_librarys_experts_on_four_ranks_compute_and_learn_as_in_one_place(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    against_whole(ranks, {"model": "mixtral", "shares": [1, 3, 2, 1]})


@pytest.mark.parametrize("shares", [[3, 2], [3, 2, 4]])
def test_six_experts_on_two_or_three_ranks_compute_and_learn_as_in_one_place(ranks: Ranks, shares: list[int]) -> None:
    one(ranks, "six", shares)


@pytest.mark.parametrize("model", ["by_hand", "pairs"])
def test_four_experts_on_four_ranks_compute_and_learn_as_in_one_place(ranks: Ranks, model: str) -> None:
    one(ranks, model, [1, 3, 2, 1])


@pytest.mark.parametrize("model", ["by_hand", "capacity", "soft", "awkward", "pairs", "stacked"])
@pytest.mark.parametrize("shares", [[3, 0], [0, 2]])
def test_a_rank_without_tokens_still_serves_the_others(ranks: Ranks, model: str, shares: list[int]) -> None:
    one(ranks, model, shares)


@pytest.mark.parametrize("model", ["by_hand", "pairs"])
def test_listed_experts_that_nobody_asks_have_no_gradient(ranks: Ranks, model: str) -> None:
    first, second = one(ranks, model, [3, 2], lazy=True)
    assert first["without"] == []
    assert second["without"] != []


def test_stacked_experts_that_nobody_asks_have_a_gradient_of_zeros(ranks: Ranks) -> None:
    for rank in one(ranks, "stacked", [3, 2, 1], lazy=True):
        assert rank["without"] == []


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("shares", [[3, 2], [3, 0], [0, 2]])
def test_recomputation_repeats_the_exchange_and_changes_no_number(ranks: Ranks, mode: str, shares: list[int]) -> None:
    again = one(ranks, "by_hand", shares, recompute=mode)
    once = one(ranks, "by_hand", shares)
    # Three exchanges more beside the five of a run that keeps what it computed.
    assert sum(rank["bytes"] for rank in again) > 1.3 * sum(rank["bytes"] for rank in once)


@pytest.mark.parametrize("model", ["by_hand", "pairs", "stacked"])
@pytest.mark.parametrize("frozen", ["nothing", "experts", "others"])
def test_micro_batches_in_flight_and_frozen_parts_learn_as_in_one_place(ranks: Ranks, model: str, frozen: str) -> None:
    for rank in ranks(f"{TARGETS}:in_flight", {"model": model, "frozen": frozen}, ranks=2):
        assert rank["experts"] <= EXACT
        assert rank["others"] <= EXACT
        assert rank["wrongly"] == []


def test_names_stay_and_only_other_ranks_experts_are_gone(ranks: Ranks) -> None:
    first, second = one(ranks, "by_hand", [1, 1])
    assert first["absent"] == sorted(first["gone"])
    assert {name.split(".")[4] for name in first["absent"]} == {"2", "3"}
    assert {name.split(".")[4] for name in second["absent"]} == {"0", "1"}
    for rank in one(ranks, "stacked", [1, 1]):
        assert rank["absent"] == []
        assert rank["gone"] == ["experts.up", "experts.bias", "experts.down"]


def test_statistics_lists_and_attributes_change_once(ranks: Ranks) -> None:
    for rank in one(ranks, "awkward", [3, 2]):
        appended, counted, tokens = rank["traces"]
        assert appended == 1
        assert counted == tokens


@pytest.mark.parametrize("model", ["by_hand", "stacked"])
def test_evaluation_is_entered_as_evaluation_and_sends_nothing_back(ranks: Ranks, model: str) -> None:
    for rank in ranks(f"{TARGETS}:evaluated", {"model": model}, ranks=2):
        assert rank["output"] <= EXACT
        assert rank["phases"] == ["evaluate"]
        assert rank["ledger"] == []


@pytest.mark.parametrize("model", ["by_hand", "pairs", "stacked"])
@pytest.mark.parametrize("shares", [[3, 2], [3, 0]])
def test_autocast_gives_what_it_gives_in_one_place(ranks: Ranks, model: str, shares: list[int]) -> None:
    for rank in ranks(f"{TARGETS}:in_half", {"model": model, "shares": shares}, ranks=2):
        assert rank["output"] <= 2**-7
        assert rank["finite"]
        assert rank["same_types"]


def test_a_librarys_fused_kernel_takes_its_share_of_the_experts(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    # It knows no float64, and asks for exactly as many groups of rows as it has experts.
    for rank in ranks(f"{TARGETS}:in_half", {"model": "mixtral grouped", "shares": [3, 1]}, ranks=2):
        assert rank["output"] <= 2**-7
        assert rank["finite"]


def test_random_numbers_repeat_with_the_seed_and_are_never_drawn_twice(ranks: Ranks) -> None:
    for rank in ranks(f"{TARGETS}:random_numbers", ranks=2):
        assert rank == [{"repeats": True, "moves_on": True, "masks_differ": True}] * 2


def test_refusals_name_the_module_and_what_to_do(ranks: Ranks) -> None:
    for said in ranks(f"{TARGETS}:refusals", ranks=2):
        assert said["indivisible"].startswith("first: 3 experts do not divide among 2 ranks")
        assert said["left whole"] == "True"
        assert "called from outside the module that routes to it" in said["directly"]
        assert said["extra"].startswith("first.1: ")
        assert "one tensor of tokens [..., 6]" in said["extra"]
        assert said["stack"].startswith("experts: called with float64 [6, 6]")
        assert "must not depend on what others answer" in said["chained"]


@pytest.mark.parametrize("model", ["by_hand", "stacked"])
def test_expert_gradients_divided_by_the_wrong_group_are_told_apart_by_numbers_alone(ranks: Ranks, model: str) -> None:
    arguments = {"cases": [{"model": model, "shares": [3, 2]}]}
    for (rank,) in ranks("distributed.expert_faults:divided_against_whole", arguments, ranks=2):
        assert rank["experts"] == pytest.approx(0.5)
        assert rank["others"] <= EXACT
        assert rank["ledger"] == []


@pytest.mark.parametrize(
    "sizes", [[[1, 4], [0, 2]], [[1, 0, 4], [0, 0, 0], [2, 3, 5]], [[0, 7, 1], [1, 0, 0], [3, 3, 3]]]
)
def test_an_uneven_all_to_all_is_entered_with_what_goes_to_others(ranks: Ranks, sizes: list[list[int]]) -> None:
    for rank, found in enumerate(ranks(f"{TARGETS}:uneven", {"sizes": sizes}, ranks=len(sizes))):
        to_others = (sum(sizes[rank]) - sizes[rank][rank]) * 3 * 4
        assert found == [{"bytes": to_others, "calls": 1, "right": True}] * 2


@pytest.mark.parametrize("ranks_number", [1, 2, 3, 4, 7, 1000])
def test_the_payload_of_an_uneven_all_to_all_costs_the_very_bytes_sent(ranks_number: int) -> None:
    for bytes_to_others in (0, 1, 2, 3, 11, 12, 999, 10**15 + 1):
        payload = even_payload(bytes_to_others=bytes_to_others, ranks=ranks_number)
        cost = sent("all_to_all", payload_bytes=payload, ranks=ranks_number)
        assert cost.bytes == (bytes_to_others if ranks_number > 1 else 0)
