"""The engine from inside: what each stage keeps in memory, what it says to misuse, that a bad step leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shoal.launch import RankFailed
from shoal.training.entry import train_run

Run = Callable[..., list[Any]]
TARGETS = "distributed.engine_targets"


@pytest.mark.parametrize("zero", range(4))
def test_each_stage_keeps_just_the_share_of_gradients_and_parameters_it_promises(ranks: Run, zero: int) -> None:
    for seen in ranks(f"{TARGETS}:memory", {"strategy": f"dp(2, zero={zero})"}, ranks=2):
        whole = seen["whole"]
        assert seen["gradients"] == (whole // 2 if zero >= 2 else whole)
        assert seen["parameters"] == (whole // 2 if zero == 3 else whole)


def test_no_whole_gradient_is_alive_after_backward_from_stage_2_on(ranks: Run) -> None:
    alive = {zero: ranks(f"{TARGETS}:memory", {"strategy": f"dp(2, zero={zero})"}, ranks=2)[0] for zero in (1, 2, 3)}
    whole = alive[1]["whole"]
    # Stage 2 gives back half of the gradients, stage 3 half of the parameters too; nothing else of that size is left.
    assert alive[1]["alive_after_backward"] - alive[2]["alive_after_backward"] >= 0.4 * whole
    assert alive[2]["alive_after_backward"] - alive[3]["alive_after_backward"] >= 0.4 * whole


@pytest.mark.parametrize(("bad", "what"), [("nan", "the loss is nan"), ("inf", "the loss is inf")])
@pytest.mark.parametrize("zero", range(4))
def test_a_loss_that_is_no_number_on_one_rank_stops_all_and_changes_nothing(
    ranks: Run, zero: int, bad: str, what: str
) -> None:
    seen = ranks(f"{TARGETS}:non_finite", {"strategy": f"dp(2, zero={zero})", "bad": bad}, ranks=2)
    for rank in seen:
        assert what in rank["said"]
        assert rank["kept"]
        assert 0 < rank["loss_after"] < 1e6
        assert 0 < rank["norm_after"] < 1e6
    assert seen[0]["loss_after"] == seen[1]["loss_after"]


def test_a_stop_that_comes_during_a_step_ends_the_run_after_that_step_on_all_ranks(ranks: Run) -> None:
    assert ranks(f"{TARGETS}:stop_during_backward", ranks=2) == [[False, True, True]] * 2


def test_calls_in_the_wrong_order_are_refused_in_words(ranks: Run) -> None:
    said = ranks(f"{TARGETS}:misuse", ranks=2)[0]
    assert "without backward" in said["step first"]
    assert said["step without last"] != ""
    assert "last=False" in said["backward after last"]
    assert "no parameter that requires a gradient" in said["nothing to train"]


@pytest.mark.parametrize("strategy", ["dp(2)", "dp(2, zero=2)", "dp(2, zero=3)"])
def test_close_gives_back_a_whole_model_that_trains_alone(ranks: Run, strategy: str) -> None:
    for seen in ranks(f"{TARGETS}:closed", {"strategy": strategy}, ranks=2):
        assert seen == {"same": True, "grads": True, "sent": 0}


@pytest.mark.parametrize("zero", [0, 3])
def test_forwards_beside_training_do_not_change_it(ranks: Run, zero: int) -> None:
    seen = ranks(f"{TARGETS}:stale", {"strategy": f"dp(2, zero={zero})"}, ranks=2)[0]
    assert seen["plain"] == seen["extra"]
    assert len(set(seen["plain"])) == 3


def test_a_parameter_used_outside_its_block_stops_training_and_says_why(ranks: Run) -> None:
    for seen in ranks(f"{TARGETS}:reaching", ranks=2):
        assert "outside the block" in seen["said"]
        assert seen["shapes"] == str([[64, 64], [64]] * 3)


def norm_cases(world: int) -> list[dict[str, Any]]:
    shares = {2: [[4, 4], [5, 2], [6, 0]], 3: [[2, 2, 2], [3, 1, 0], [0, 0, 5]]}[world]
    cases = [
        {"dims": dims, "shares": share, "affine": affine, "momentum": momentum}
        for dims, share, affine, momentum in product((1, 2, 3), shares, (True, False), (0.1, None))
    ]
    return [*cases, {"dims": 2, "shares": shares[0], "track_running_stats": False}]


@pytest.mark.parametrize("world", [2, 3])
def test_synchronised_batch_norm_is_torchs_own_at_the_full_batch(ranks: Run, world: int) -> None:
    cases = norm_cases(world)
    for found in ranks(f"{TARGETS}:norms", {"cases": cases}, ranks=world):
        for difference, case in zip(found, cases, strict=True):
            assert difference < 1e-9, case


@pytest.mark.parametrize("backend", ["shoal", "shoal-gloo"])
def test_engines_after_one_another_leave_no_descriptors_threads_or_groups(ranks: Run, backend: str) -> None:
    strategies = ["dp(4)", "dp(2, zero=3) * dp(2)", "dp(2) * dp(2, via=shared())", "dp(4, zero=1)"]
    settings = {"backend": backend, "strategies": strategies, "engines": 20}
    for seen in ranks(f"{TARGETS}:one_after_another", settings, ranks=4, timeout_s=120):
        assert seen["after"] == seen["before"]
        assert seen["groups"] == 1, "only the world's group is left"
        assert seen["known"] <= 1
        if backend == "shoal":
            assert "the group was closed" in seen["said"]


def test_layers_with_a_forward_of_their_own_are_synchronised_and_keep_it(ranks: Run) -> None:
    cases: list[dict[str, Any]] = [
        {"kind": kind, "shares": shares, "settings": settings}
        for kind in ("active", "doubled", "sync", "sync subclass", "by hand")
        for shares in ([3, 2], [4, 0])
        for settings in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False})
        if not (kind == "by hand" and settings)
    ]
    cases.append({"kind": "active", "shares": [1, 1], "plane": [1, 1]})
    for found in ranks(f"{TARGETS}:norm_layers", {"cases": cases}, ranks=2):
        for difference, case in zip(found, cases, strict=True):
            assert difference < 1e-9, case


def test_a_batch_norm_that_cannot_be_synchronised_is_refused_by_name(ranks: Run) -> None:
    for found in ranks(f"{TARGETS}:norm_layers", {"cases": [{"kind": "own statistics", "shares": [2, 2]}]}, ranks=2):
        assert found[0] == (
            "the model (OwnStatistics) takes the statistics of its batch without torch.nn.functional.batch_norm, so "
            "they cannot be taken over all replicas; call that function in its forward, or declare "
            'batch_norm="local" in the job'
        )


@pytest.mark.parametrize(
    ("strategy", "calls", "widths"),
    [
        ("dp(2, zero=3)", [[0, 1, 2], [0, 2, 1]], [8, 8, 8]),
        ("dp(2, zero=3)", [[0, 1], [0, 2]], [8, 8, 8]),
        ("dp(2, zero=3)", [[0, 1, 2], [0, 2]], [8, 8, 8]),
        ("dp(2, zero=3)", [[0, 1, 2], [0, 1]], [8, 8, 8]),
        ("dp(2, zero=3)", [[0, 1, 2], []], [8, 12, 16]),
        ("dp(2, zero=3)", [[0, 1, 2], [2, 1, 0]], [8, 12, 16]),
        ("dp(3, zero=3)", [[0, 1, 2], [0, 1, 2], [0, 0, 2]], [8, 8, 8]),
    ],
)
def test_ranks_that_call_different_blocks_under_zero_3_are_named_at_once(
    ranks: Run, strategy: str, calls: list[list[int]], widths: list[int]
) -> None:
    asked = {"strategy": strategy, "calls": calls, "widths": widths}
    seen = ranks(f"{TARGETS}:choosing", asked, ranks=len(calls))
    said = [rank["said"] for rank in seen if rank["said"]]
    assert said
    for text in said:
        assert text.startswith("zero=3: every rank must call the same blocks in the same order")
        assert "block 'blocks." in text
        assert text.endswith("A model that skips or chooses blocks by its data trains with zero=2")
    assert all(rank["kept"] for rank in seen if rank["said"])


def test_a_difference_inside_one_group_ends_the_job_in_the_same_sentence(ranks: Run) -> None:
    calls = [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2]]
    asked = {"strategy": "dp(2) * dp(2, zero=3)", "calls": calls, "widths": [8, 8, 8], "raise": True}
    with pytest.raises(RankFailed, match="every rank must call the same blocks"):
        ranks(f"{TARGETS}:choosing", asked, ranks=4)


def test_ranks_that_call_different_blocks_train_under_zero_2(ranks: Run) -> None:
    asked = {"strategy": "dp(2, zero=2)", "calls": [[0, 1, 2], [0, 2]], "widths": [8, 8, 8]}
    seen = ranks(f"{TARGETS}:choosing", asked, ranks=2)
    assert seen[0]["losses"] == seen[1]["losses"]
    assert [rank["said"] for rank in seen] == ["", ""]


@pytest.mark.parametrize("calls", [[[0, 1, 2], [0, 2, 1]], [[0, 1], [0, 2]]])
def test_other_backends_find_different_blocks_before_the_update(ranks: Run, calls: list[list[int]]) -> None:
    asked = {"strategy": "dp(2, zero=3)", "calls": calls, "widths": [64, 64, 64], "backend": "shoal-gloo"}
    for rank in ranks(f"{TARGETS}:choosing", asked, ranks=2):
        assert rank["said"].startswith("zero=3: every rank must call the same blocks in the same order")
        assert rank["kept"]


def test_a_parameter_read_outside_its_block_is_named_by_the_training_loop(ranks: Run, tmp_path: Path) -> None:
    job = str(Path(__file__).parent / "jobs" / "odd.py") + ":reaching"
    asked = {"job": job, "strategy": "dp(2, zero=3)", "steps": 2, "folder": str(tmp_path), "gate": False}
    with pytest.raises(RankFailed) as caught:
        ranks(train_run, asked, ranks=2)
    assert str(caught.value).endswith(
        "The cause: the model reads the parameter blocks.0.up.weight outside of the forward of the block that it "
        "belongs to, where zero=3 has not gathered it; read it inside, or train with zero=2"
    )


def test_a_loss_that_grows_without_bound_under_zero_3_is_not_blamed_on_reads(ranks: Run, tmp_path: Path) -> None:
    job = str(Path(__file__).parent / "jobs" / "odd.py") + ":diverging"
    asked = {"job": job, "strategy": "dp(2, zero=3)", "steps": 60, "folder": str(tmp_path), "gate": False}
    with pytest.raises(RankFailed) as caught:
        ranks(train_run, asked, ranks=2)
    assert "A lower learning rate" in str(caught.value)
    assert "zero=3" not in str(caught.value).replace("dp(2, zero=3)", "")
