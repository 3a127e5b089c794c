"""Ranks that others have started end when they should: at a signal, without their launcher, cut off from the store."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(
    script: str, tmp_path: Path, *, rank: int, world: int, port: int, **more: str
) -> Iterator[subprocess.Popen[str]]:
    file = tmp_path / f"rank{rank}.py"
    file.write_text(script)
    paths = os.pathsep.join(path for path in sys.path if path)
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SHOAL_TOKEN": "one",
        **more,
    }
    process = subprocess.Popen(
        [sys.executable, str(file)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


WAITS = """
from shoal.launch.channel import standalone_channel
from shoal.launch.join import join
standalone_channel()
print("waits", flush=True)
join(meet_s=100)
"""


@pytest.mark.parametrize("listening", [False, True], ids=["for rank 0", "for the others"])
def test_sigterm_ends_a_rank_that_waits_for_others(tmp_path: Path, listening: bool) -> None:
    with started(WAITS, tmp_path, rank=0 if listening else 1, world=2, port=_free_port()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "shoal: SIGTERM while ranks were connecting: stopped" in said


CUT_OFF = """
import os, signal, torch, torch.distributed as dist
from shoal.launch import watch
watch.UNREACHABLE_S = 2.0
from shoal.launch.channel import standalone_channel
from shoal.launch.join import join
standalone_channel(hang_after_s=1.0)
me = join()
dist.barrier()
if me.rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
"""


def test_a_rank_whose_store_does_not_answer_any_more_ends(tmp_path: Path) -> None:
    port = _free_port()
    with (
        started(CUT_OFF, tmp_path, rank=0, world=2, port=port),
        started(CUT_OFF, tmp_path, rank=1, world=2, port=port) as other,
    ):
        _, said = other.communicate(timeout=60)
    assert other.returncode == 1
    assert "shoal: rank 1 on " in said
    assert "the store at 127.0.0.1 has not answered" in said


TRAINS = """
import time
from shoal.launch.channel import standalone_channel
from shoal.launch.join import join
channel = standalone_channel()
join()
print("trains", flush=True)
while not channel.stop_requested:
    time.sleep(0.05)
print("stops", flush=True)
"""
LAUNCHER = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {script!r}])
time.sleep(600)
"""


def test_a_rank_whose_launcher_was_killed_stops(tmp_path: Path) -> None:
    script = LAUNCHER.format(script=TRAINS)
    with started(script, tmp_path, rank=0, world=1, port=_free_port(), TORCHELASTIC_RUN_ID="7") as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "trains\n"
        agent.kill()
        assert agent.stdout.readline() == "stops\n"
