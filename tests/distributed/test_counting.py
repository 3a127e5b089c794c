"""The counting group on real ranks: it computes what plain Gloo does and enters what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distributed.collectives import DIRECT, PUBLIC, N
from shoal.comm.choice import on_one_host
from shoal.comm.group import COUNTED
from shoal.comm.wire import sent

Ranks = Callable[..., list[Any]]
P = 2
PART, WHOLE = 4 * N, 4 * N * P

PUBLIC_ENTRIES: dict[str, list[tuple[str, int, int]]] = {
    "all_reduce": [("all_reduce", 1, PART)],
    "all_reduce of two, coalesced": [("all_reduce", 1, 2 * PART)],
    "all_reduce_coalesced": [("all_reduce", 1, 2 * PART)],
    "reduce": [("reduce", 1, PART)],
    "broadcast": [("broadcast", 1, PART)],
    "all_gather": [("all_gather", 1, WHOLE)],
    "all_gather_single": [("all_gather", 1, WHOLE)],
    "all_gather_into_tensor": [("all_gather", 1, WHOLE)],
    "reduce_scatter": [("reduce_scatter", 1, WHOLE)],
    "reduce_scatter_single": [("reduce_scatter", 1, WHOLE)],
    "reduce_scatter_tensor": [("reduce_scatter", 1, WHOLE)],
    "all_to_all": [("all_to_all", 1, WHOLE)],
    "all_to_all_single": [("all_to_all", 1, WHOLE)],
    "gather": [("gather", 1, WHOLE)],
    "scatter": [("scatter", 1, WHOLE)],
    "send and recv": [("recv", 1, PART), ("send", 1, PART)],
    "barrier": [("barrier", 1, 0)],
    "functional all_reduce": [("all_reduce", 1, PART)],
    "functional all_gather": [("all_gather", 1, WHOLE)],
    "functional reduce_scatter": [("reduce_scatter", 1, WHOLE)],
    "functional all_to_all": [("all_to_all", 1, WHOLE)],
}
OF_TWO = ("allreduce_coalesced", "allgather_coalesced")
UNSUPPORTED: set[str] = set()
"""What plain Gloo itself does not do."""


def rows(backend: str, entries: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    found = []
    for kind, calls, payload_bytes in entries:
        algorithm = on_one_host("", kind, payload_bytes, P) if backend == "shoal" else None
        cost = sent(kind, payload_bytes=payload_bytes, ranks=P, algorithm=algorithm)
        sizes = {"calls": calls, "messages": cost.messages * calls, "bytes": cost.bytes * calls}
        found.append({"axis": "world", "phase": "setup", "kind": kind, **sizes})
    return found


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_every_public_collective_is_entered_and_computes_what_gloo_does(ranks: Ranks, backend: str) -> None:
    both = ranks("distributed.collectives:compare_with_plain", {"table": "public", "backend": backend}, ranks=P)
    for rank, found in enumerate(both):
        assert set(found) == set(PUBLIC)
        for name, each in found.items():
            assert (name, each["same"], each["trouble"], each["plain_trouble"]) == (name, True, "", "")
            expected = PUBLIC_ENTRIES.get(name)
            if name == "recv from anyone":
                expected = [("send", 1, PART)] if rank == 0 else [("recv", 1, PART)]
            assert expected is not None
            assert (name, each["ledger"]) == (name, rows(backend, expected))


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_every_counted_method_is_entered_and_computes_what_gloo_does(ranks: Ranks, backend: str) -> None:
    both = ranks("distributed.collectives:compare_with_plain", {"table": "direct", "backend": backend}, ranks=P)
    assert set(COUNTED) <= set(DIRECT)
    for found in both:
        for name, each in found.items():
            if name in UNSUPPORTED:
                assert each["plain_trouble"]
                continue
            assert (name, each["same"], each["trouble"], each["plain_trouble"]) == (name, True, "", "")
            kind, _ = COUNTED[name.partition(" ")[0]]
            if kind in ("send", "recv"):
                expected = [("recv", 1, PART), ("send", 1, PART)]
            elif name == "monitored_barrier" and backend == "shoal":
                expected = [("gather", 1, 0), ("scatter", 1, P * 8 * P)]  # To rank 0, and a list of all ranks back.
            elif kind == "barrier":
                expected = [("barrier", 1, 0)]
            else:
                payload = PART if kind in ("all_reduce", "broadcast", "reduce") else WHOLE
                expected = [(kind, 1, 2 * payload if name in OF_TWO else payload)]
                if backend == "shoal" and name == "allgather_coalesced":
                    expected = [(kind, 2, payload)]  # One after the other, within one call.
            assert (name, each["ledger"]) == (name, rows(backend, expected))


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_the_replaced_collectives_equal_a_serial_computation(ranks: Ranks, number: int, backend: str) -> None:
    assert ranks("distributed.collectives:against_serial", {"backend": backend}, ranks=number) == [[]] * number


def test_sums_means_and_gathers_are_really_carried_by_the_replacements(ranks: Ranks) -> None:
    expected = {"sum": "shoal", "mean": "shoal", "max": "torch", "small gather": "torch", "gather": "shoal"}
    assert ranks("distributed.collectives:who_carries", ranks=2) == [expected] * 2


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_completed_means_that_the_result_is_there(ranks: Ranks, backend: str) -> None:
    assert ranks("distributed.collectives:polled_to_completion", {"backend": backend}, ranks=3) == [[True, True]] * 3


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_other_reductions(ranks: Ranks, backend: str) -> None:
    found = ranks("distributed.collectives:other_operations", {"backend": backend}, ranks=2)
    assert found == [{"MAX": True, "MIN": True, "PRODUCT": True}] * 2


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_ddp_and_fully_shard_have_the_gradients_of_plain_gloo(ranks: Ranks, backend: str) -> None:
    for found in ranks("distributed.collectives:gradients", {"backend": backend}, ranks=2):
        assert max(found["differences"].values()) < 1e-14
        assert found["calls"]["plain ddp"] == found["calls"]["plain fully_shard"] == []
        assert "all_reduce" in found["calls"]["counted ddp"]
        assert found["calls"]["counted fully_shard"] == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_what_would_make_uncounted_groups_is_refused(ranks: Ranks, backend: str) -> None:
    (words,) = ranks("distributed.collectives:refused", {"backend": backend}, ranks=1)
    assert len(words) == 2
    assert all("use torch.distributed.new_group" in each for each in words)


@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_the_book_knows_the_last_collective_of_each_group(ranks: Ranks, backend: str) -> None:
    first, second, third = ranks("distributed.collectives:last_calls", {"backend": backend}, ranks=3)
    assert first == second
    assert [2, "all_reduce", "gradient"] in first.values()
    assert [1, "broadcast", "setup"] in first.values()
    assert list(third.values()) == [[2, "all_reduce", "gradient"]]
