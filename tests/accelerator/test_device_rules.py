"""What an accelerator asks of the engine: a device for each rank, processes that fork before they use it, and a host
that does not wait before backward. And that the proofs on the device can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerator.test_axes_on_device import JOBS, LANGUAGE, MOE
from shoal.train.launch.failure import RankFailed

On = Callable[..., Any]
A_MISS = 1e-6


def test_each_rank_computes_on_the_device_of_its_number(on_device: On) -> None:
    found = on_device("accelerator.targets:surroundings", ranks=2)
    assert [row["device"] for row in found] == ["reef:0", "reef:1"]
    assert {(row["backend"], row["sum"], *row["notes"]) for row in found} == {("shoal-reefccl", 3.0)}


def test_with_fewer_devices_than_ranks_all_compute_in_host_memory_and_say_so(on_device: On) -> None:
    found = on_device("accelerator.targets:surroundings", ranks=3, environment={"REEF_DEVICES": "1"})
    assert {(row["device"], row["backend"], row["sum"]) for row in found} == {("cpu", "shoal", 6.0)}
    assert found[0]["notes"] == [
        "a host has 3 ranks and 1 reef device: all ranks compute in host memory. Start one rank for each device to use "
        "them"
    ]


def test_an_accelerator_that_is_asked_for_and_not_there_is_refused(on_device: On) -> None:
    with pytest.raises(RankFailed) as refused:
        on_device(
            "accelerator.targets:surroundings", {"backend": "shoal-reefccl"}, ranks=2, environment={"REEF_DEVICES": "1"}
        )
    assert str(refused.value) == (
        "--backend reefccl: rank 1 has no reef device of its own, since its host has 1 and it is rank 1 there; "
        "start fewer ranks on that host, or leave --backend out to compute in host memory"
    )


def test_a_backend_of_host_memory_that_is_asked_for_is_taken(on_device: On) -> None:
    found = on_device("accelerator.targets:surroundings", ranks=2, environment={"SHOAL_BACKEND": "shoal"})
    assert {(row["device"], row["backend"]) for row in found} == {("cpu", "shoal")}


def test_a_backend_that_is_not_there_is_refused(on_device: On) -> None:
    with pytest.raises(RankFailed) as refused:
        on_device("accelerator.targets:surroundings", ranks=1, environment={"SHOAL_BACKEND": "nccl"})
    assert str(refused.value) == "SHOAL_BACKEND nccl: expected shoal, gloo or reefccl"


def test_ranks_are_forked_before_anything_touches_the_device(on_device: On) -> None:
    found = on_device("accelerator.targets:fork_after_use", ranks=1)[0]
    assert found == {"used_before": False, "child": "reef: cannot re-initialise the device in a forked child"}


def test_shared_memory_on_a_device_is_refused(on_device: On) -> None:
    asked = {"job": LANGUAGE, "strategy": "dp(2, via=shared())"}
    assert set(on_device("accelerator.targets:refuses_host_memory", asked, ranks=2)) == {
        "dp(2, via=shared()): via=shared() keeps one copy of the parameters in host memory, and this model is on reef; "
        "use via=allreduce(), or compute in host memory with SHOAL_BACKEND=shoal"
    }


def test_barriers_know_their_device(on_device: On) -> None:
    assert on_device("accelerator.targets:barriers_know_their_device", {"job": LANGUAGE}, ranks=2) == [[], []]


STEADY = [
    "dp(2)", "dp(2) * accumulate(2)", "dp(2, zero=1)", "dp(2, zero=3)", "tp(2)", "tp(2, sequence=True)", "cp(2)",
    'cp(2, "ulysses")', "pp(2, micro=4)", 'pp(2, "interleaved", micro=4, chunks=2)', 'dp(2) * amp("bf16")',
]  # fmt: skip


def test_the_host_does_not_wait_before_the_end_of_backward(on_device: On) -> None:
    asked = {"cases": [(LANGUAGE, text) for text in STEADY]}
    for rank in on_device("accelerator.targets:waits_of_steps", asked, ranks=2):
        assert {row["case"]: row["before"] for row in rank} == dict.fromkeys(STEADY, 0)
        assert all(row["after"] <= 4 for row in rank), rank
        assert all(row["peak"] == row["exact_peak"] > 0 for row in rank)


def test_experts_wait_for_the_sizes_of_their_messages_only(on_device: On) -> None:
    for rank in on_device("accelerator.targets:waits_of_steps", {"cases": [(MOE, "dp(2)"), (MOE, "ep(2)")]}, ranks=2):
        # The model itself asks which tokens chose an expert. Under ep its layers run twice, the first time to learn
        # that; then the numbers of rows are written and read once in each of the two layers.
        assert rank[1]["before"] == 2 * rank[0]["before"] + 2 * 2, rank


SWAPPED = [(LANGUAGE, 'pp(2, "gpipe", micro=4)')]


def test_receives_posted_in_another_order_than_sends_are_caught(on_device: On) -> None:
    asked = {"cases": SWAPPED, "steps": 2}
    rows = on_device("accelerator.targets:looks_ahead_first", asked, ranks=2, environment={"REEF_P2P": "eager"})
    assert max(rank[0]["difference"] for rank in rows) > A_MISS
    # The ledger cannot see it: the same bytes went the same ways.
    assert [rank[0]["ledger"] for rank in rows] == [[], []]


def test_with_tags_the_same_fault_goes_unseen(on_device: On) -> None:
    asked = {"cases": SWAPPED, "steps": 2}
    rows = on_device("accelerator.targets:looks_ahead_first", asked, ranks=2, environment={"SHOAL_BACKEND": "gloo"})
    assert max(rank[0]["difference"] for rank in rows) < A_MISS


def test_both_directions_on_one_group_deadlock(on_device: On) -> None:
    asked = {"cases": [(LANGUAGE, "pp(2, micro=4)")], "steps": 1}
    with pytest.raises(RankFailed, match="deadlock by NCCL's rules"):
        on_device("accelerator.targets:without_lanes", asked, ranks=2, environment={"REEF_P2P_LIMIT_S": "4"})


CODECS = ["fp16()", "int8()", "onebit()", "topk(0.05)", "randomk(0.1)", "powersgd(2)", "dgc(0.05)"]


def test_every_family_of_compression_trains_on_a_device(on_device: On) -> None:
    asked = {"job": f"{JOBS / 'uneven.py'}:language", "terms": CODECS, "steps": 3}
    first, second = on_device("accelerator.targets:trained_codecs", asked, ranks=2)
    for one, other in zip(first, second, strict=True):
        assert one["sums"] == other["sums"], one["term"]
        assert one["ledger"] == [], (one["term"], one["ledger"])
        assert one["losses"] == other["losses"]
        assert one["losses"][-1] < one["losses"][0], (one["term"], one["losses"])


def test_without_a_compiler_the_device_is_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerator import build

    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.CannotBuild, match=r"there is no C\+\+ compiler"):
        build.built()
