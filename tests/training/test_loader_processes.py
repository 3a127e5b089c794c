"""Processes that read: their batches are those of the data, they hide what the formula says, none outlives its rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.job import JobError, Order
from shoal.runtime.loader_processes import LoaderProcesses
from shoal.runtime.read_ahead import ReadAhead
from training.slow_job import BATCH, SAMPLES, SEED, VALUES
from training.test_prefetch import Slow, trained

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
JOB = str(Path(__file__).with_name("slow_job.py"))


class Several:
    """Entries of many types and shapes."""

    def __init__(self, load_s: float = 0.0) -> None:
        self.load_s = load_s

    def __len__(self) -> int:
        return 64

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        time.sleep(self.load_s)
        if 60 in indices:
            raise IndexError("sixty")
        if 61 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.arange(64.0)[torch.as_tensor(indices)]
        return {
            "x": x,
            "half": x[:, None].bfloat16() * torch.ones(3),
            "even": x % 2 == 0,
            "none": torch.ones(len(x), 0),
            "turned": (x[:, None] * torch.arange(6.0)).reshape(-1, 2, 3).mT,
            "complex": x * 1j,
        }


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(what: Any, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.02)
    return bool(what())


@pytest.mark.parametrize("indices", [[3, 1, 3], []])
def test_a_batch_of_a_process_is_that_of_the_data(indices: list[int]) -> None:
    wanted = np.array(indices, dtype=np.int64)
    loaders = LoaderProcesses(Several(), processes=1)
    plain, found = Several().batch(wanted), loaders.batch(wanted)
    again = loaders.batch(np.array([5]))
    loaders.close()
    assert list(found) == list(plain)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    found["x"] += 1.0  # It is the rank's own, also after the process has ended.
    assert again["x"].tolist() == [5.0]


def test_processes_hide_what_the_formula_says() -> None:
    steps, compute_s, load_s, loaders = 8, 0.15, 0.4, 3
    reader = ReadAhead(Slow(load_s), loaders=loaders, processes=True)
    seen, took_s = trained(reader, steps=steps, ahead=loaders, compute_s=compute_s)
    reader.close()
    order, counter = Order(0, 64, 8), 0
    for batch in seen:
        assert batch == [float(each) for each in order.indices(counter)]
        counter = order.next(counter)
    assert took_s > 0.9 * (steps - 1) * max(compute_s, load_s / loaders)
    assert took_s < 0.7 * (steps - 1) * (compute_s + load_s)


def test_errors_and_crashes_are_reported_with_the_samples() -> None:
    loaders = LoaderProcesses(Several(), processes=2)
    with pytest.raises(JobError, match=r"could not read samples \[60\]: IndexError: sixty"):
        loaders.batch(np.array([60]))
    assert loaders.batch(np.array([2]))["x"].tolist() == [2.0]
    with pytest.raises(JobError, match=r"was killed by SIGKILL while it read samples \[1, 61\]"):
        loaders.batch(np.array([1, 61]))
    loaders.close()
    assert not any(alive(pid) for pid in loaders.pids)


def test_sparse_entries_are_refused() -> None:
    class Sparse(Several):
        def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
            return {"x": torch.eye(3).to_sparse()}

    loaders = LoaderProcesses(Sparse(), processes=1)
    with pytest.raises(JobError, match="entry x is a Tensor; loader processes pass dense tensors"):
        loaders.batch(np.array([0]))
    loaders.close()


def test_a_reading_process_does_not_delay_the_end() -> None:
    loaders = LoaderProcesses(Several(load_s=60.0), processes=1)

    def read() -> None:
        with contextlib.suppress(JobError):
            loaders.batch(np.array([0]))

    threading.Thread(target=read, daemon=True).start()
    time.sleep(0.2)
    started = time.monotonic()
    loaders.close()
    assert time.monotonic() - started < 10
    assert not any(alive(pid) for pid in loaders.pids)


def test_losses_are_the_same_to_the_bit(tmp_path: Path) -> None:
    runs = [
        shoal.train(
            "language:tiny",
            "dp(2) * accumulate(2)",
            steps=4,
            folder=tmp_path / str(loaders),
            loader_processes=loaders,
            gate=False,
            checkpoint_every=0,
        )
        for loaders in (0, 2)
    ]
    assert runs[0].losses == runs[1].losses


def test_resumed_in_mid_epoch_with_other_loaders_and_ranks_the_order_is_the_same(tmp_path: Path) -> None:
    """An epoch has 40 samples, a batch 12: the stop after 5 steps is in the middle of the second epoch."""
    first = shoal.train(
        JOB, "dp(2)", steps=5, folder=tmp_path / "run", gate=False, checkpoint_every=5, prefetch=3, loader_processes=2
    )
    resumed = shoal.train(
        JOB, "dp(3)", steps=10, resume=str(tmp_path / "run"), gate=False, prefetch=2, loader_processes=3
    )
    losses = [*first.losses, *resumed.losses[-5:]]
    order, counter, wanted = Order(SEED, SAMPLES, BATCH), 0, []
    for _ in range(10):
        wanted.append(int(VALUES[order.indices(counter)].sum()))
        counter = order.next(counter)
    assert [round(loss * BATCH) for loss in losses] == wanted
    assert len(set(wanted)) == 10


def test_waiting_for_data_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that take 0.4 s for a batch leave 0.2 s a step, in which next to nothing is computed."""
    monkeypatch.setenv("SLOW_JOB_S", "0.4")
    run = shoal.train(
        JOB, "serial", steps=12, folder=tmp_path / "run", gate=False, checkpoint_every=0, loader_processes=2
    )
    [rank] = run.summary["ranks"]
    assert 0.1 < rank["data_s"] < 0.4
    assert rank["data_s"] > 0.5 * rank["wall_s"]


def test_no_loader_outlives_a_killed_rank(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        JOB,
        "--strategy",
        "dp(2)",
        "--steps",
        "2000",
        "--folder",
        str(tmp_path / "run"),
        "--loader-processes",
        "2",
        "--no-gate",
    ]
    environment = {**os.environ, "SLOW_JOB_S": "0.05", "SLOW_JOB_LOG": str(log)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    def loaders() -> list[int]:
        return [int(path.name.removeprefix("loader-")) for path in log.iterdir()]

    try:
        assert wait_for(lambda: len(loaders()) == 4, 60)
        found = loaders()
        rank = int(Path(f"/proc/{found[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(rank, signal.SIGKILL)
        assert wait_for(lambda: not any(alive(pid) for pid in found))
        out, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "SIGKILL" in out or "signal 9" in out
    finally:
        process.kill()
        process.wait()
