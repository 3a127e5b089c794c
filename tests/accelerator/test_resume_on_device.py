"""Checkpoints on a device: the same bits when a run goes on there, and the same training when it goes on under another
strategy or in host memory. Memory that a run records is the device's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerator.test_axes_on_device import JOBS, LANGUAGE
from shoal.strategy import parse
from shoal.training.entry import train_run

On = Callable[..., Any]
DROPOUT = f"{JOBS / 'odd.py'}:dropout"
STEPS = 4


def train(on_device: On, folder: Path, job: str, strategy: str, *, host: bool = False, **changes: Any) -> Any:
    asked = {"job": job, "strategy": strategy, "steps": STEPS, "checkpoint_every": 2, "gate": False, **changes}
    asked["folder"] = str(folder)
    environment = {"SHOAL_BACKEND": "shoal"} if host else {}
    outcome = on_device(train_run, asked, ranks=parse(strategy).world, environment=environment)[0]
    assert outcome["status"] == "finished"
    return outcome


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def checkpoint(folder: Path, step: int) -> str:
    return str(next(path for path in (folder / "checkpoints").iterdir() if path.name == f"step-{step:08d}"))


def test_a_run_with_dropout_goes_on_in_the_same_bits(on_device: On, tmp_path: Path) -> None:
    train(on_device, tmp_path / "one", DROPOUT, "dp(2)")
    train(on_device, tmp_path / "two", DROPOUT, "dp(2)", resume=checkpoint(tmp_path / "one", 2))
    assert losses(tmp_path / "two") == losses(tmp_path / "one")[2:]


def test_a_run_goes_on_under_another_strategy_and_in_host_memory(on_device: On, tmp_path: Path) -> None:
    first = train(on_device, tmp_path / "one", LANGUAGE, "dp(2, zero=3)")
    # Exact, where the host's figure would be that of a process with PyTorch in it.
    assert 0 < first["memory_bytes"] < 20e6
    for rank in first["ranks"]:
        assert 0 < rank["memory_bytes"] < 20e6
        assert 0 < rank["device_s"] <= rank["wall_s"] * 2
    for name, strategy, host in (("pp", "pp(2, micro=4)", False), ("tp", "tp(2)", True)):
        train(on_device, tmp_path / name, LANGUAGE, strategy, host=host, resume=checkpoint(tmp_path / "one", 2))
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one")[2:], rel=1e-4)
    train(on_device, tmp_path / "back", LANGUAGE, "dp(2, zero=1)", resume=checkpoint(tmp_path / "tp", 4), steps=6)
    assert len(losses(tmp_path / "back")) == 2
