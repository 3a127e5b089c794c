"""Mutated checkpoints, re-signed ones among them: refused by the project's own exception, or read as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.checkpoint_targets import Net, engine_for, train
from checkpoint.mutations import try_many
from shoal.checkpoint.checksum import RestoredWrongly
from shoal.checkpoint.opening import open_checkpoint
from shoal.checkpoint.restore import CheckpointMismatch
from shoal.checkpoint.rows import CheckpointBroken
from shoal.checkpoint.save import restore, save
from shoal.launch import run_ranks
from shoal.training.entry import train_run

TARGETS = "checkpoint.checkpoint_targets"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """By one rank, by three with sharded state, and by two that cut tensors between them."""
    root = tmp_path_factory.mktemp("originals")
    engine = engine_for("serial")
    train(engine, 0, 1)
    found = [save(root / "serial", engine, step=1, progress={"counter": 12})]
    cases = [{"strategy": "dp(3, zero=2)", "optimizer": "adamw", "dtype": "float64", "folder": str(root / "three")}]
    run_ranks(f"{TARGETS}:save_cases", {"cases": cases}, ranks=3)
    settings = {"job": "language:tiny", "strategy": "tp(2)", "folder": str(root / "cut"), "steps": 1, "gate": False}
    settings |= {"checkpoint_every": 1, "evaluate_every": 0}
    run_ranks(train_run, settings, ranks=2)
    return [*found, root / "three" / "step-00000003", *(root / "cut" / "checkpoints").iterdir()]


def everything(path: Path) -> Any:
    """All that can be read of a checkpoint; one of the test's own model is also restored."""
    checkpoint = open_checkpoint(path)
    found: dict[str, Any] = {"step": checkpoint.step}
    for name, whole in checkpoint.parameters.items():
        numel = torch.Size(whole.shape).numel()
        found[name] = (whole, bits(checkpoint.read_parameter(name, 0, numel)), checkpoint.numbers(name))
        for key in checkpoint.keys(name):
            found[f"{name} {key}"] = bits(checkpoint.read(name, key, 0, numel))
    for name, values in checkpoint.buffers().items():
        found[f"buffer {name}"] = (values.shape, bits(values))
    if "blocks.2.narrow.bias" in checkpoint.parameters and len(checkpoint.parameters) == PARAMETERS:
        engine = engine_for("serial", seed=3)
        restore(engine, checkpoint)
        found["model"] = [bits(values) for values in engine.model.state_dict().values()]
    return found


PARAMETERS = len(list(Net().parameters()))


def bits(values: torch.Tensor) -> tuple[Any, bytes]:
    return values.dtype, values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def require(found: dict[str, Any], count: int) -> None:
    print({key: value for key, value in found.items() if key != "wrong"})
    assert found["wrong"] == []
    assert found["refused"] + found["identical"] == count
    assert found["refused"] > count // 2


def test_three_hundred_mutations_are_refused_or_harmless(originals: list[Path], tmp_path: Path) -> None:
    refused = (CheckpointBroken, CheckpointMismatch, RestoredWrongly)
    require(try_many(originals, tmp_path, everything, refused, seed=1, count=300), 300)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_mutations_are_refused_or_harmless(originals: list[Path], tmp_path: Path) -> None:
    refused = (CheckpointBroken, CheckpointMismatch, RestoredWrongly)
    require(try_many(originals, tmp_path, everything, refused, seed=2, count=10_000), 10_000)
