"""What an accelerator asks of the engine: a device for each rank, processes that fork before they use it, and a host
that does not wait before backward. And that the proofs on the device can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerator.test_axes_on_device import DROPPING, JOBS, LANGUAGE, MOE
from comm.compressors import written
from shoal.launch.failure import RankFailed

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
    "dp(2)",
    "dp(2) * accumulate(2)",
    "dp(2, zero=1)",
    "dp(2, zero=2)",
    "dp(2, zero=3)",
    "tp(2)",
    "tp(2, sequence=True)",
    "cp(2)",
    'cp(2, "ulysses")',
    "pp(2, micro=4)",
    'pp(2, "interleaved", micro=4, chunks=2)',
    'pp(2, "zero-bubble", micro=4)',
    'dp(2) * amp("bf16")',
]
SLOWER = [
    (LANGUAGE, 'pp(2, "gpipe", micro=4)'),
    (LANGUAGE, 'pp(2, "zero-bubble", micro=4, chunks=2)'),
    (LANGUAGE, "tp(2, batch=True)"),
    (LANGUAGE, "dp(2, compress=topk(0.1))"),
    *((DROPPING, text) for text in ("tp(2)", "cp(2)", "pp(2, micro=2)", 'dp(2, zero=3) * recompute("full")')),
    *((f"{JOBS / 'odd.py'}:{job}", 'dp(2) * recompute("full")') for job in ("norm", "spectral", "buffers")),
]


def require_no_waits(on_device: On, cases: list[tuple[str, str]]) -> None:
    for rank in on_device("accelerator.targets:waits_of_steps", {"cases": cases}, ranks=2):
        assert [(row["case"], row["before"]) for row in rank] == [(text, 0) for _, text in cases]
        assert all(row["after"] <= 4 for row in rank), rank
        assert all(row["peak"] == row["exact_peak"] > 0 for row in rank)


def test_the_host_does_not_wait_before_the_end_of_backward(on_device: On) -> None:
    require_no_waits(on_device, [*((LANGUAGE, text) for text in STEADY), (DROPPING, "dp(2)")])


@pytest.mark.slow
def test_nor_does_it_with_dropout_norms_or_recomputation(on_device: On) -> None:
    require_no_waits(on_device, SLOWER)


@pytest.mark.parametrize(
    "strategy",
    [
        "dp(2)",
        pytest.param("dp(2, zero=3)", marks=pytest.mark.slow),
        pytest.param("pp(2, micro=2)", marks=pytest.mark.slow),
    ],
)
def test_a_wait_that_is_added_before_backward_is_counted(on_device: On, strategy: str) -> None:
    asked = {"cases": [(LANGUAGE, strategy)], "reads_the_loss": True}
    rows = on_device("accelerator.targets:waits_of_steps", asked, ranks=2)
    assert max(rank[0]["before"] for rank in rows) > 0


@pytest.mark.parametrize(
    ("calls", "widths"),
    [
        ([[0, 1], [0, 2]], [8, 8, 8]),
        pytest.param([[0, 1, 2], [0, 2]], [8, 8, 8], marks=pytest.mark.slow),
        pytest.param([[0, 1, 2], []], [8, 12, 16], marks=pytest.mark.slow),
        pytest.param([[0, 1, 2], [2, 1, 0]], [8, 12, 16], marks=pytest.mark.slow),
        pytest.param([[0, 1, 2], [0, 1, 2], [0, 0, 2]], [8, 8, 8], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_call_different_blocks_under_zero_3_are_named_on_a_device(
    on_device: On, calls: list[list[int]], widths: list[int]
) -> None:
    asked = {"strategy": f"dp({len(calls)}, zero=3)", "calls": calls, "widths": widths, "raise": True}
    with pytest.raises(RankFailed) as ended:
        on_device("distributed.engine_targets:choosing", asked, ranks=len(calls))
    assert str(ended.value).startswith("zero=3: every rank must call the same blocks in the same order")
    assert "gathers the block 'blocks." in str(ended.value)
    assert str(ended.value).endswith("A model that skips or chooses blocks by its data trains with zero=2")


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


MORE = {name: f"{name}(0.05)" for name in ("topk", "mstopk", "hitopk", "gtopk", "dgc")}
CODECS = [
    *written("rounding"),
    *written("feedback", sketch="sketch(5, 200)", powersgd="powersgd(2)", randomk="randomk(0.1)", **MORE),
]
DRAWING = written("unbiased")
"""What they round up or down is drawn on each rank by its device's own generator."""


def trained(on_device: On, ranks: int, steps: int, terms: list[str], **options: Any) -> dict[str, list[float]]:
    """The losses of each term, after everything else was checked."""
    asked = {"job": LANGUAGE, "terms": terms, "steps": steps}
    everyone = on_device("accelerator.targets:trained_codecs", asked, ranks=ranks, **options)
    for rows in zip(*everyone, strict=True):
        one = rows[0]
        assert all(row["sums"] == one["sums"] and row["losses"] == one["losses"] for row in rows), one["term"]
        assert one["ledger"] == [], (one["term"], one["ledger"])
        assert one["losses"][-1] < one["losses"][0], (one["term"], one["losses"])
    return {row["term"]: row["losses"] for row in everyone[0]}


def test_all_compression_trains_on_a_device(on_device: On) -> None:
    trained(on_device, 2, 2, [*CODECS, *DRAWING])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_compression_on_a_device_trains_as_in_host_memory(on_device: On, ranks: int) -> None:
    there = trained(on_device, ranks, 3, CODECS)
    here = trained(on_device, ranks, 3, CODECS, environment={"SHOAL_BACKEND": "shoal"})
    for term, losses in there.items():
        assert losses == pytest.approx(here[term], rel=1e-5), term


def test_without_a_compiler_the_device_is_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerator import build

    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.CannotBuild, match=r"there is no C\+\+ compiler"):
        build.built()
