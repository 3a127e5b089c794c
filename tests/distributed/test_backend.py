"""The shoal backend on real ranks, over shared memory and over TCP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal.launch import RankFailed
from shoal.training.entry import train_run

Ranks = Callable[..., list[Any]]
TARGETS = "distributed.backend_targets"
CARRIERS = ("auto", "tcp")


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_equals_a_serial_computation(ranks: Ranks, world: int, carrier: str) -> None:
    more = [4 << 20] if world == 2 else []
    assert ranks(f"{TARGETS}:everything", {"carrier": carrier, "more": more}, ranks=world) == [[]] * world


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3])
def test_random_collectives_on_many_groups_neither_mismatch_nor_hang(ranks: Ranks, world: int, carrier: str) -> None:
    found = ranks(f"{TARGETS}:at_random", {"carrier": carrier, "seed": 11 * world, "count": 600}, ranks=world)
    assert found == [{"wrong": 0}] * world


@pytest.mark.slow
@pytest.mark.parametrize("carrier", CARRIERS)
def test_ten_thousand_random_collectives(ranks: Ranks, carrier: str) -> None:
    settings = {"carrier": carrier, "seed": 5, "count": 10_000}
    assert ranks(f"{TARGETS}:at_random", settings, ranks=4, timeout_s=600) == [{"wrong": 0}] * 4


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_ledger_says_what_the_links_were_given(ranks: Ranks, world: int) -> None:
    found = [pair for rank in ranks(f"{TARGETS}:bytes_entered", ranks=world) for pair in rank]
    entered, sent = (sum(pair[side] for pair in found) for side in (0, 1))
    assert abs(entered - sent) <= 4 * world * world  # The formulas are means over ranks, rounded down.


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_that_dies_is_named_by_all_others_within_seconds(ranks: Ranks, carrier: str) -> None:
    said: list[dict[str, Any]] = []
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        ranks(
            f"{TARGETS}:survivors",
            {"dies": 1, "carrier": carrier},
            ranks=3,
            on_message=lambda rank, message: said.append(message),
        )
    assert time.monotonic() - start < 30
    assert {message["lost"] for message in said if "lost" in message} <= {1}


def test_a_peer_that_is_given_up_on_does_not_poison_the_rest(ranks: Ranks) -> None:
    first, *_ = ranks(f"{TARGETS}:given_up", ranks=3)
    assert first == {"lost": 1, "from_2": [0.0, 1.0, 2.0, 3.0]}


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("dp(2, via=shared())", 2),
        ("dp(4, via=shared())", 4),
        ("dp(4, via=shared()) * accumulate(2)", 4),
        ("dp(2) * dp(2, via=shared())", 4),
        ("pp(2, '1f1b', micro=4) * dp(2, via=shared())", 4),
        ("tp(2) * dp(2, via=shared())", 4),
        ("dp(4, via=allreduce('tree'))", 4),
        ("dp(4, via=allreduce('butterfly'))", 4),
        ("dp(2, via=allreduce('rabenseifner'))", 2),
    ],
)
def test_each_path_between_replicas_trains_exactly_as_the_serial_run(ranks: Ranks, strategy: str, world: int) -> None:
    cases = [["language:tiny", strategy]]
    for (found,) in ranks("distributed.proofs:prove_many", {"cases": cases, "steps": 4}, ranks=world, timeout_s=120):
        assert found["difference"] <= 1e-10, found["where"]
        assert found["ledger"] == []


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_in_one_memory_may_lack_gradients_and_have_odd_ones(ranks: Ranks, world: int) -> None:
    jobs = ["unused", "late", "sometimes", "sparse", "tied", "one_linear", "short", "uneven", "loose"]
    cases = [[job, f"dp({world}, via=shared())"] for job in jobs]
    for rows in ranks("distributed.proofs:prove_many", {"cases": cases, "steps": 4}, ranks=world, timeout_s=120):
        for row in rows:
            assert row["difference"] <= 1e-10, (row["case"], row["where"])
            assert row["ledger"] == [], row["case"]


def test_a_sum_in_one_memory_does_not_depend_on_who_comes_first(ranks: Ranks) -> None:
    for same in ranks(f"{TARGETS}:in_any_order", ranks=4):
        assert same == [True, True]


def test_two_replicas_in_one_memory_share_one_gradient(ranks: Ranks) -> None:
    """Pages that nobody wrote to take no memory: parameters, gradients and a page for what is written."""
    for seen in ranks(f"{TARGETS}:pages_in_use", ranks=4):
        assert seen["apart"] == pytest.approx(1 + 4, abs=0.1)
        assert seen["together"] == pytest.approx(1 + 2, abs=0.1)


def test_emulated_links_take_the_time_of_those_they_stand_for(ranks: Ranks) -> None:
    """Two hosts at 100 Mb/s and 2 ms: a ring of two sends half the vector twice."""
    settings = {"emulate": "2x1, 1us, 20GB/s | 2ms, 100Mb/s", "sizes": [400_000]}
    for rank in ranks(f"{TARGETS}:emulated_times", settings, ranks=2):
        assert 36 <= rank["400000"] <= 36 * 1.5


@pytest.mark.parametrize(("shape", "world"), [("2x2", 4), ("3x2", 6), ("2x3", 6)])
def test_the_ledger_knows_the_hosts_of_a_hierarchical_all_reduce(ranks: Ranks, shape: str, world: int) -> None:
    settings = {"emulate": f"{shape}, 1us, 20GB/s | 10us, 1GB/s"}
    for seen in ranks(f"{TARGETS}:hierarchical_counts", settings, ranks=world):
        assert seen["ledger"] == seen["sent"]


def test_collectives_of_two_levels_train_as_predicted(ranks: Ranks) -> None:
    strategies = ["dp(4, via=allreduce('hierarchical'))", "dp(4, zero=1)", "dp(4, zero=3)", "dp(2) * dp(2, zero=2)"]
    asked = {"cases": [["language:tiny", strategy] for strategy in strategies], "steps": 3}
    emulated = {"SHOAL_EMULATE": "2x2, 1us, 20GB/s | 10us, 1GB/s"}
    for rows in ranks("distributed.proofs:prove_many", asked, ranks=4, timeout_s=120, environment=emulated):
        for row in rows:
            assert row["difference"] <= 1e-10, (row["case"], row["where"])
            assert row["ledger"] == [], row["case"]


def test_gathers_and_scatters_over_emulated_hosts_and_over_hosts_of_unequal_size(ranks: Ranks) -> None:
    settings = {"emulate": "2x2, 1us, 20GB/s | 10us, 1GB/s"}
    assert ranks(f"{TARGETS}:over_hosts", settings, ranks=4) == [[]] * 4


def test_gloo_is_not_asked_for_an_algorithm_it_does_not_have(ranks: Ranks) -> None:
    settings = {"job": "language:tiny", "strategy": "dp(2, via=allreduce('tree'))", "backend": "gloo", "gate": False}
    with pytest.raises(RankFailed, match="use --backend shoal") as caught:
        ranks(train_run, settings, ranks=2)
    assert caught.value.for_user


def test_a_soft_limit_on_descriptors_makes_way_for_groups(ranks: Ranks) -> None:
    for seen in ranks(f"{TARGETS}:few_descriptors", {"hard": False}, ranks=2):
        assert seen["total"] == 30 * seen["world"]
        assert seen["most"] < seen["soft"] == seen["hard"]


def test_a_hard_limit_on_descriptors_is_told_with_what_was_needed(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailed, match=r"takes 2 file descriptors.* may have \d+ \(RLIMIT_NOFILE.*ulimit -Hn"
    ) as told:
        ranks(f"{TARGETS}:few_descriptors", {"hard": True}, ranks=2)
    assert told.value.for_user


@pytest.mark.parametrize("world", [2, 3])
def test_a_sum_of_sparse_tensors_is_that_of_dense_ones(ranks: Ranks, world: int) -> None:
    found = ranks(f"{TARGETS}:sparse_sums", ranks=world)
    for rank in found:
        assert rank["wrong"] == []
        assert rank["told"].startswith("an all-reduce of sparse tensors: the shape, ")
        assert all(abs(entered - sent) <= world for entered, sent in rank["counted"]), rank["counted"]


@pytest.mark.parametrize(
    ("away", "wait_for_all", "first", "others"),
    [
        ([2], False, "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 1000 ms", "Rank 2 failed"),
        ([1, 3], True, "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms", "Ranks 1, 3 failed"),
        ([1, 3], False, "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms", "Rank 1 failed"),
        ([0], False, "", "it did not reply in 1000 ms"),
    ],
)
def test_a_monitored_barrier_names_the_ranks_that_did_not_arrive(
    ranks: Ranks, away: list[int], wait_for_all: bool, first: str, others: str
) -> None:
    found = ranks(f"{TARGETS}:monitored", {"away": away, "all": wait_for_all}, ranks=4)
    assert [each["sum"] for each in found] == [4.0] * 4
    assert found[0]["told"] == first
    for rank in {1, 2, 3} - set(away):
        start = f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv"
        assert found[rank]["told"].startswith(start)
        assert others in found[rank]["told"]
