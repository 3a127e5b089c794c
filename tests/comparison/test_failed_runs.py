"""Runs that really fail, and what `explain` makes of their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.launch import RankFailed

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]
QUIET: dict[str, Any] = {"gate": False, "checkpoint_every": 0, "evaluate_every": 0}

LARGE = """
import os, resource
from dataclasses import replace
from functools import partial
from shoal.job import load_job
from shoal.job.models.gpt import GPT, GPTConfig

plain = load_job("language:tiny")
config = GPTConfig(layers=2, heads=4, hidden=1024, sequence=32)
job = replace(plain, model=partial(GPT, config), validation=None)
if os.environ.get("WORLD_SIZE") == "2":
    # As a container would: less than parameters, gradients and both moments need.
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 400_000_000, size + 400_000_000))
"""
STUCK = """
import os, time
from dataclasses import dataclass, replace
from typing import Any
from shoal.job import load_job

@dataclass
class Sticking:
    data: Any
    def __len__(self):
        return len(self.data)
    def batch(self, indices):
        if os.environ.get("RANK") == "1" and os.environ.get("WORLD_SIZE") == "2":
            self.count = getattr(self, "count", 0) + 1
            if self.count == 4:
                time.sleep(60)
        return self.data.batch(indices)

plain = load_job("language:tiny")
job = replace(plain, train=Sticking(plain.train), validation=None)
"""


def failed(tmp_path: Path, job: str, **options: Any) -> Any:
    folder = tmp_path / "run"
    with pytest.raises((RankFailed, ValueError)):
        shoal.train(job, "dp(2)", folder=folder, **QUIET, **options)
    return shoal.explain_run(folder)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.py"
    path.write_text(text)
    return str(path)


def test_a_lack_of_memory_names_the_allocation_and_what_fits(tmp_path: Path) -> None:
    found = failed(tmp_path, written(tmp_path, LARGE), steps=4)
    assert "The allocation that failed was" in found.advice, found
    assert "optimizer" in found.advice
    assert "zero=" in found.advice, found


def test_a_hang_names_the_rank_the_collective_and_its_stack(tmp_path: Path) -> None:
    found = failed(tmp_path, written(tmp_path, STUCK), steps=20, hang_after_s=4)
    assert "rank 1" in found.reason
    assert "all_reduce" in found.reason
    assert "job.py" in found.advice, found
    assert "in batch" in found.advice


def test_a_loss_that_is_not_finite_shows_how_it_came_to_it(tmp_path: Path) -> None:
    found = failed(tmp_path, "language:tiny", steps=200, set={"lr": 3e5, "clip": None})
    assert "learning rate" in found.advice, found
    assert "last good one" in found.advice or "first step" in found.advice
