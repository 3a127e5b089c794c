"""Every compression trains both small tasks: the validation loss of the language model and the accuracy of the
classifier end within the band that its contract states, beside the dense run of as many steps.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from comm.compressors import term_of, written
from shoal.launch import run_ranks
from shoal.strategy import contract, parse
from shoal.training.entry import train_run

METHODS = [
    *written("rounding"),
    *written("unbiased"),
    *written("feedback", sketch="sketch(3, 300)", powersgd="powersgd(2)"),
]
METRIC = {"language": "loss", "image": "accuracy"}
POINTS = 0.04
"""Of accuracy, on 240 images: three standard deviations of chance and a little."""


def strategy_of(method: str) -> str:
    return f"dp(2, compress={method})" + (" * dp(2)" if term_of(method).between_groups else "")


def trained(task: str, strategy: str, folder: Path) -> float:
    """The validation metric after the task's own number of steps."""
    asked: dict[str, Any] = {
        "job": task,
        "size": "tiny",
        "strategy": strategy,
        "folder": str(folder),
        "checkpoint_every": 0,
        "gate": False,
    }
    run_ranks(train_run, asked, ranks=parse(strategy).world)
    last = json.loads((folder / "validation.jsonl").read_text().splitlines()[-1])
    return float(last["metrics"][METRIC[task]])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda task: trained(task, "dp(2)", tmp_path_factory.mktemp("dense")))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", METRIC)
def test_small_tasks_end_within_the_band_that_is_stated(task: str, method: str, dense: Any, tmp_path: Path) -> None:
    strategy = strategy_of(method)
    found, expected = trained(task, strategy, tmp_path), dense(task)
    if task == "language":
        assert found <= expected * (1 + contract(parse(strategy)).within)
    else:
        assert found >= expected - POINTS
