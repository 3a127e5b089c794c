"""Batches that are read ahead are those that would have been read, and reading hides behind computing."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.job import JobError, Order, TensorData
from shoal.runtime.read_ahead import ReadAhead, require_readable_ahead

DATA = TensorData(x=torch.arange(64.0))


class Slow:
    """Takes a while to read, and notes what is read."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.read = seconds, []

    def __len__(self) -> int:
        return len(DATA)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        self.read.append(indices.tolist())
        return DATA.batch(indices)


def trained(data: Any, *, steps: int, ahead: int, compute_s: float) -> tuple[list[Any], float]:
    """What steps would see, and the seconds that they take after the first."""
    order, seen, counter, start = Order(0, len(DATA), 8), [], 0, 0.0
    for step in range(steps):
        seen.append(data.batch(order.indices(counter))["x"].tolist())
        following = counter = order.next(counter)
        if ahead:
            coming = []
            for _ in range(ahead):
                coming.append(order.indices(following))
                following = order.next(following)
            data.expect(coming)
        time.sleep(compute_s)
        start = time.perf_counter() if step == 0 else start
    return seen, time.perf_counter() - start


@pytest.mark.parametrize(("threads", "load_s"), [(1, 0.08), (3, 0.2)])
def test_a_step_takes_the_longer_of_loading_and_computing(threads: int, load_s: float) -> None:
    steps, compute_s = 8, 0.08
    plain, _ = trained(DATA, steps=steps, ahead=0, compute_s=0.0)
    reader = ReadAhead(Slow(load_s), loaders=threads)
    seen, took_s = trained(reader, steps=steps, ahead=threads, compute_s=compute_s)
    reader.close()
    assert seen == plain
    alone_s = (steps - 1) * (compute_s + load_s)
    assert took_s < 0.8 * alone_s
    assert took_s > 0.9 * (steps - 1) * max(compute_s, load_s / threads)


def test_what_is_no_longer_expected_is_not_waited_for() -> None:
    slow = Slow(0.0)
    reader = ReadAhead(slow, loaders=1)
    reader.expect([np.array([1, 2]), np.array([3])])
    assert reader.batch(np.array([3]))["x"].tolist() == [3.0]
    reader.expect([np.array([5])])
    assert reader.batch(np.array([1, 2]))["x"].tolist() == [1.0, 2.0]
    reader.close()


def test_an_error_of_a_reader_comes_in_the_step_of_its_batch() -> None:
    reader = ReadAhead(DATA, loaders=1)
    reader.expect([np.array([7]), np.array([999])])
    assert reader.batch(np.array([7]))["x"].tolist() == [7.0]
    with pytest.raises(IndexError):
        reader.batch(np.array([999]))
    reader.close()


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.rand(), random.random])
def test_data_that_draws_from_global_generators_is_refused(draw: Any) -> None:
    class Draws(Slow):
        def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
            draw()
            return DATA.batch(indices)

    require_readable_ahead(Slow(0.0), np.array([0]))
    with pytest.raises(JobError, match=r"global generator of (torch|numpy|random)"):
        require_readable_ahead(Draws(0.0), np.array([0]))


@pytest.mark.processes
def test_losses_are_the_same_to_the_bit(tmp_path: Path) -> None:
    runs = [
        shoal.train(
            "language:tiny",
            "dp(2) * accumulate(2)",
            steps=4,
            folder=tmp_path / str(ahead),
            prefetch=ahead,
            loader_threads=2,
            gate=False,
            checkpoint_every=0,
        )
        for ahead in (0, 3)
    ]
    assert runs[0].losses == runs[1].losses
    with pytest.raises(ValueError, match="at least 1 thread must read"):
        shoal.train("language:tiny", "dp(2)", folder=tmp_path / "x", loader_threads=0)
