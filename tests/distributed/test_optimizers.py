"""Every optimiser trains as in a plain PyTorch loop and resumes to the bit, or is refused by name before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from distributed.optimizer_zoo import COUPLED, ELEMENTWISE, PARAMETERWISE

Run = Callable[..., list[Any]]
TARGETS = "distributed.optimizer_targets"
EXACT = 1e-10


def check(found: list[dict[str, Any]], label: str) -> None:
    for rank in found:
        row = rank[label]
        assert row.get("difference", 1.0) < EXACT, (label, row)
        assert row["resumed"], (label, row)
        assert all(apart < EXACT for apart in row["others"].values()), (label, row)


FAST = (
    "AdamW-tensor",
    "SGD-nesterov",
    "ScheduleFree",
    "Madgrad",
    "Counted",
    "Lookahead",
    "Adafactor",
    "LBFGS",
    "Prodigy",
    "Muon",
)


def fast_and_slow(names: Iterable[str]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", fast_and_slow(ELEMENTWISE))
def test_elementwise_optimizers_train_and_resume_as_one_process_under_any_strategy(
    ranks: Run, name: str, tmp_path: Path
) -> None:
    strategies = ["dp(2)", "dp(2, zero=1)", "dp(2, zero=3) * accumulate(3)"]
    settings = {
        "optimizers": [name],
        "strategies": strategies,
        "others": ["dp(2, zero=2)"],
        "folder": str(tmp_path),
    }
    found = ranks(f"{TARGETS}:zoo", settings, ranks=2)
    for strategy in strategies:
        check(found, f"{name} {strategy}")


@pytest.mark.parametrize("name", fast_and_slow(PARAMETERWISE))
def test_optimizers_of_full_parameters_train_and_resume_as_one_process_where_ranks_hold_pieces(
    ranks: Run, name: str, tmp_path: Path
) -> None:
    strategies = ["dp(2)", "dp(2, zero=1)", "dp(2, zero=3) * accumulate(3)"]
    settings = {
        "optimizers": [name],
        "strategies": strategies,
        "others": ["dp(2, zero=2)", "dp(2)"],
        "folder": str(tmp_path),
    }
    found = ranks(f"{TARGETS}:zoo", settings, ranks=2)
    for strategy in strategies:
        check(found, f"{name} {strategy}")


@pytest.mark.parametrize("name", fast_and_slow(COUPLED))
def test_coupled_optimizers_train_on_replicas_and_are_refused_on_pieces(ranks: Run, name: str, tmp_path: Path) -> None:
    strategies = ["dp(2)", "dp(2) * accumulate(3)", "dp(2, zero=1)", "dp(2, zero=3)", "pp(2)"]
    settings = {
        "optimizers": [name],
        "strategies": strategies,
        "others": ['dp(2) * recompute("full")'],
        "folder": str(tmp_path),
    }
    found = ranks(f"{TARGETS}:zoo", settings, ranks=2)
    for strategy in strategies[:2]:
        check(found, f"{name} {strategy}")
    for zero in (1, 3):
        said = found[0][f"{name} dp(2, zero={zero})"]["refused"]
        assert f"{name} couples parameters, and zero={zero} gives each rank slices of them" in said
    assert f"{name} couples parameters, and pp gives each rank some of them" in found[0][f"{name} pp(2)"]["refused"]


@pytest.mark.parametrize(
    "names",
    [
        ["AdamW-tensor", "ScheduleFree", "Counted", "SGD-nesterov"],
        ["Muon", "Shampoo"],
        pytest.param(["LARS", "LAMB", "Adafactor"], marks=pytest.mark.slow),
    ],
)
def test_three_uneven_ranks_and_levels(ranks: Run, names: list[str], tmp_path: Path) -> None:
    strategies = ["dp(3, zero=2)"]
    settings = {"optimizers": names, "strategies": strategies, "others": ["dp(3)"], "folder": str(tmp_path)}
    found = ranks(f"{TARGETS}:zoo", settings, ranks=3)
    for name in names:
        check(found, f"{name} {strategies[0]}")


@pytest.mark.parametrize(
    "strategy", ["dp(2)", "dp(2, zero=1) * accumulate(3)", "dp(2, zero=3)", 'dp(2) * recompute("full")']
)
def test_a_loop_of_ones_own_with_a_scheduler_trains_as_plain_pytorch(ranks: Run, strategy: str) -> None:
    for rank in ranks(f"{TARGETS}:own_loop", {"strategy": strategy}, ranks=2):
        assert rank["apart"] < EXACT
        assert rank["keys"]
        assert rank["ones"]
        assert "call engine.step()" in rank["said"]["step"]
        if "zero=3" in strategy:
            assert "state_dict() of the model would hold NaN; call engine.state_dict()" in rank["said"]["state_dict"]
            assert "call engine.load_state_dict(state) on every rank" in rank["said"]["load"]
        if "accumulate" in strategy:
            assert rank["skipped"] == [True, True, False]
            assert rank["said"]["last"].startswith("last=True was given, but accumulate(3) already says")


def test_amp_reaches_the_model_of_a_loop_of_ones_own(ranks: Run) -> None:
    for rank in ranks(f"{TARGETS}:own_loop_amp", {"strategy": 'dp(2, zero=3) * amp("bf16")'}, ranks=2):
        assert rank == {"inside": "torch.bfloat16", "outside": "torch.float32", "after": "torch.float32"}
