"""What reading ahead hides of a slow loader: measured steps next to max(T, L / min(n, k)).

    python benchmarks/prefetch.py [--load 1.5] [--compute 0.5] [--steps 12]

A batch takes `load` seconds to read (asleep, as a remote store lets one wait) and a step `compute` seconds (asleep in
forward), on one rank. k steps are read ahead by n threads or processes. Waiting for data is what the run's record says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _report import report
from torch import nn

import shoal
from shoal.job import Job, TensorData

ROWS = ((0, 0, ""), (1, 1, "thread"), (2, 2, "thread"), (2, 2, "process"), (4, 4, "process"), (2, 4, "process"))
"""Steps ahead, loaders, and what they are."""
START = 4
"""Steps left out: the first are read while nothing is computed."""


class Slow:
    """Samples that take a while."""

    def __init__(self) -> None:
        self.data = TensorData(x=torch.arange(64.0)[:, None])

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        time.sleep(float(os.environ["PREFETCH_LOAD_S"]))
        return self.data.batch(indices)


class Busy(nn.Linear):
    """Takes a while to compute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(float(os.environ["PREFETCH_COMPUTE_S"]))
        return super().forward(x)


job = Job(
    name="slow",
    model=lambda: Busy(1, 1),
    train=Slow(),
    loss=lambda output, batch: (output.sum(), len(output)),
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0),
    global_batch=8,
    steps=10,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--compute", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    os.environ |= {"PREFETCH_LOAD_S": str(asked.load), "PREFETCH_COMPUTE_S": str(asked.compute)}
    rows, losses = [], []
    for ahead, loaders, kind in ROWS:
        how = {"loader_threads" if kind == "thread" else "loader_processes": loaders} if loaders else {}
        with tempfile.TemporaryDirectory() as folder:
            run = shoal.train(
                str(Path(__file__)),
                "serial",
                steps=asked.steps,
                folder=Path(folder) / "run",
                gate=False,
                checkpoint_every=0,
                prefetch=ahead,
                on_message=lambda message: None,
                **how,
            )
            step_s = statistics.median(row["step_s"] for row in run.steps[START:])
            losses.append(run.losses)
        expected_s = max(asked.compute, asked.load / min(loaders, ahead)) if loaders else asked.compute + asked.load
        rows.append(
            {
                "loaders": f"{loaders} {kind}" if loaders else "none",
                "steps_ahead": ahead,
                "formula_s": expected_s,
                "measured_s": step_s,
                "data_wait_s": run.summary["ranks"][0]["data_s"],
            }
        )
    assert all(each == losses[0] for each in losses), "the order of the data changed"
    report(rows, title=f"L = {asked.load} s, T = {asked.compute} s", as_json=asked.json)


if __name__ == "__main__":
    main()
