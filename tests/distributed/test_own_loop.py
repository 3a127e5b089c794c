"""A training loop of one's own: what one process would train otherwise is refused or warned of, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., list[Any]]
TARGETS = "distributed.own_loop_targets"


@pytest.mark.parametrize("strategy", ["dp(2)", "dp(2, zero=3)"])
def test_state_that_replicas_change_is_refused_until_it_is_declared(ranks: Run, strategy: str) -> None:
    for rank, found in enumerate(ranks(f"{TARGETS}:buffers", {"strategy": strategy}, ranks=2)):
        assert found["buffer"].startswith("ReplicasDiffer: after step 1 the buffer mean differs between replicas, by ")
        assert "shoal.engine(..., buffers={'mean': 'average'})" in found["buffer"]
        assert "the frozen parameter mean differs between replicas" in found["parameter"]
        assert not found["buffer updated"]
        assert not found["attribute"]
        warned = [text for text in found["attribute warned"] if "mean differs between replicas" in text]
        assert len(warned) == (rank == 0)
        assert found["seen"][0] == found["seen"][1]
        assert found["mean apart"] < 1e-13
        assert "buffers names 'maen', but no buffer of the model matches" in found["misspelt"]
        assert "buffers has 'mean' for '*', but a mode is one of" in found["mode"]


def test_losses_and_counts_that_do_not_add_up_are_named(ranks: Run) -> None:
    first, second = ranks(f"{TARGETS}:losses", {"strategy": "dp(2)"}, ranks=2)
    assert first["right"] == first["right, zero=3, accumulate"] == []
    assert len(first["unchecked"]) == 1
    assert "engine.check(loss_of, *batch) checks it" in first["unchecked"][0]
    assert [text for text in first["mean"] if text.startswith("every loss came with a count of 1")]
    assert [text for text in first["uneven"] if text.startswith("all ranks gave the count 7, but their models saw")]
    assert [text for text in first["global"] if "the number of samples of all ranks together" in text]
    assert second["mean"] == second["uneven"] == second["global"] == second["unchecked"] == []
    for found in (first, second):
        assert found["check mean"].startswith("SamplesCoupled: rank 0: the loss is a mean, not a sum: of 12 samples")
        assert (
            "rank 0: the count is wrong: of 12 samples it is 12, of 2 and 10 of them 12 and 12" in found["check count"]
        )
        assert "coupled, by model or loss" in found["check coupled"]
        assert "has 1 samples, and two are needed" in found["one"]
        assert "a loss of shape [12]; pass the sum of the losses" in found["vector"]
        assert "the count requires a gradient" in found["count grad"]
        assert "NormScaled couples parameters" in found["optimizer"]


AXES = ["tp(2)", "pp(2, 'gpipe', micro=2)", "cp(2, 'ring')", "dp(2, zero=3) * accumulate(3)"]


@pytest.mark.parametrize("strategy", [*AXES, pytest.param("dp(2, zero=1) * tp(2)", marks=pytest.mark.slow)])
def test_whole_batches_train_by_any_axis_as_a_plain_loop_does(ranks: Run, tmp_path: Any, strategy: str) -> None:
    from shoal import parse

    full = "pp" not in strategy and "tp" not in strategy
    arguments = {"strategy": strategy, "folder": str(tmp_path)}
    for rank, found in enumerate(ranks(f"{TARGETS}:any_axes", arguments, ranks=parse(strategy).world)):
        assert found["rank"] == rank
        assert found["mine"] == pytest.approx(found["losses"], rel=1e-12)
        assert found["evaluated"] == pytest.approx(found["other"], rel=1e-12)
        assert found["lr"] == pytest.approx(0.0025)
        assert found["saved"] < 1e-10
        if full:
            assert found["worst"] < 1e-10
            assert found["given back"] < 1e-10
        else:
            assert "leave each rank a part of the model. engine.save(folder, step=n)" in found["refused"]


def test_three_lines_with_scheduler_save_load_and_evaluation_under_zero_3(ranks: Run, tmp_path: Any) -> None:
    arguments = {"strategy": "dp(2, zero=3) * accumulate(2)", "folder": str(tmp_path / "kept")}
    for found in ranks(f"{TARGETS}:three_lines", arguments, ranks=2):
        assert found["mine"] == pytest.approx(found["losses"], rel=1e-12)
        assert found["evaluated"] == pytest.approx(found["other"], rel=1e-12)
        assert found["one sample"] > 0
        assert found["lr"] == pytest.approx(0.0025)
        assert "give shoal.engine(..., example=batch, loss=function)" in found["train_batch"]
        assert "how the model may be cut is inferred from a batch and its loss" in found["pp"]
        assert "there is no intact checkpoint; engine.save writes one" in found["nothing saved"]
