"""A run's folder belongs to one run at a time, and to none once its processes are gone, however they went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.training.local import train_job
from shoal.training.record import lock
from shoal.training.record.lock import FolderBusy, join, take
from shoal.training.resumed import CannotTrain

pytestmark = pytest.mark.processes

HOLDS = """
import sys, time
from pathlib import Path
from shoal.training.record.lock import join, take
folder = Path(sys.argv[1])
held = join(folder, sys.argv[2]) if len(sys.argv) > 2 else take(folder, say=print)
print(held.token, flush=True)
time.sleep(60)
"""
STEPS = 10


def silent(text: str) -> None:
    raise AssertionError(text)


def holder(folder: Path, *token: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder), *token], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_every_process_of_a_run_holds_its_folder_and_a_kill_releases_it(tmp_path: Path) -> None:
    parent, token = holder(tmp_path)
    rank, _ = holder(tmp_path, token)
    said: list[str] = []
    with pytest.raises(FolderBusy, match=f"{tmp_path} is in use by another run .process {parent.pid}.; wait for its"):
        take(tmp_path, say=said.append, wait_s=0.8)
    assert len(said) == 1
    assert f"waiting for {tmp_path}" in said[0]
    parent.kill()
    parent.wait()
    with pytest.raises(FolderBusy, match=f"process {rank.pid}"):
        take(tmp_path, say=silent, wait_s=0.1)
    rank.kill()
    rank.wait()
    with take(tmp_path, say=silent, wait_s=0.1) as mine:
        assert mine.token != token
        with pytest.raises(FolderBusy, match="was taken by another run"):
            join(tmp_path, token)
        join(tmp_path, mine.token).release()
    take(tmp_path, say=silent, wait_s=0.0).release()


def test_a_run_in_a_folder_that_another_holds_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, _ = holder(tmp_path)
    monkeypatch.setattr(lock, "WAIT_S", 0.1)
    try:
        with pytest.raises(CannotTrain, match=f"{tmp_path} is in use by another run .process {other.pid}"):
            train_job("language:tiny", "dp(2)", folder=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [lock.LOCK]
    finally:
        other.kill()
        other.wait()


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run in a process of its own, which has written checkpoints."""
    command = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        "language:tiny",
        "--strategy",
        "dp(2)",
        "--folder",
        str(folder),
        "--steps",
        str(STEPS),
        "--checkpoint-every",
        "1",
        "--no-gate",
        *words,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    give_up = time.monotonic() + 60
    while not (folder / "checkpoints" / "step-00000003").exists():
        assert process.poll() is None, process.stderr
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return process


def final(folder: Path) -> list[bytes]:
    files = sorted((folder / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))
    assert files
    return [file.read_bytes() for file in files]


@pytest.mark.slow
def test_a_second_run_is_refused_and_after_a_kill_a_resume_ends_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = tmp_path / "run", list[str]()
    options = {"steps": STEPS, "checkpoint_every": 1, "gate": False}
    first = begin(folder)
    try:
        os.kill(first.pid, signal.SIGSTOP)  # So that it does not end by itself; its ranks wait or go on.
        with monkeypatch.context() as patched:
            patched.setattr(lock, "WAIT_S", 0.6)
            with pytest.raises(CannotTrain, match=f"the folder {folder} is in use by another run .process {first.pid}"):
                train_job(
                    "language:tiny",
                    "dp(2)",
                    folder=folder,
                    resume=str(folder),
                    on_message=lambda message: said.append(message.get("text", "")),
                    **options,
                )
        assert any(text.startswith(f"waiting for {folder}") for text in said)
    finally:
        first.kill()
    again = train_job("language:tiny", "dp(2)", folder=folder, resume=str(folder), **options)
    first.wait()
    undisturbed = train_job("language:tiny", "dp(2)", folder=tmp_path / "other", **options)
    assert again.status == undisturbed.status == "finished"
    assert again.losses == undisturbed.losses
    assert final(folder) == final(tmp_path / "other")
