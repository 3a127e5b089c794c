"""What goes wrong on ranks: one message that names the cause, and nothing left behind."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch import RankFailed, RankHung, run_ranks
from shoal.launch.rendezvous import PREFIX

Ranks = Callable[..., list[Any]]
TARGETS = "distributed.targets"


@pytest.fixture
def said() -> Iterator[list[dict[str, Any]]]:
    """Messages of ranks; afterwards no rank that told its pid is alive and no meeting place is left."""
    messages: list[dict[str, Any]] = []
    yield messages
    pids = [message["pid"] for message in messages if "pid" in message]
    assert pids
    assert not [pid for pid in pids if _alive(pid)]
    assert not [m["rendezvous"] for m in messages if "rendezvous" in m and Path(m["rendezvous"]).parent.exists()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_exception_names_its_rank_and_ends_the_waiting_others(ranks: Ranks, said: list[dict[str, Any]]) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        ranks(
            f"{TARGETS}:raise_while_others_wait",
            {"failing": 1},
            ranks=3,
            on_message=lambda rank, m: said.append(m),
        )
    assert time.monotonic() - start_s < 10
    error = caught.value
    assert error.rank == 1
    assert str(error) == error.message
    assert error.message.startswith("rank 1 failed: KeyError: 'the cause ✂")
    assert "\n" not in error.message
    assert "in raise_while_others_wait" in error.traceback_text
    assert error.error_type == "KeyError"
    assert not error.for_user
    assert len(said) == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_users_mistake_keeps_its_own_words(ranks: Ranks, said: list[dict[str, Any]], failing: int) -> None:
    with pytest.raises(RankFailed) as caught:
        ranks(
            f"{TARGETS}:raise_while_others_wait",
            {"failing": failing, "for_user": True},
            ranks=2,
            on_message=lambda rank, m: said.append(m),
        )
    assert caught.value.message == "this is for the person who started it\nand has two lines"
    assert caught.value.for_user
    assert caught.value.rank == failing
    assert caught.value.error_type == "shoal.launch.join.JoinError"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_rank_that_dies_by_a_signal_is_named_with_it(
    ranks: Ranks, said: list[dict[str, Any]], number: signal.Signals
) -> None:
    with pytest.raises(RankFailed, match=f"^rank 1 was killed by {number.name}") as caught:
        ranks(
            f"{TARGETS}:end_without_a_word",
            {"failing": 1, "signal": int(number)},
            ranks=3,
            on_message=lambda rank, m: said.append(m),
        )
    assert caught.value.rank == 1


@pytest.mark.parametrize("status", [0, 7])
def test_a_rank_that_exits_before_its_work_is_done_is_named(
    ranks: Ranks, said: list[dict[str, Any]], status: int
) -> None:
    with pytest.raises(RankFailed, match=f"^rank 0 ended with exit status {status} before its work was done$"):
        ranks(
            f"{TARGETS}:end_without_a_word",
            {"failing": 0, "status": status},
            ranks=2,
            on_message=lambda rank, m: said.append(m),
        )


def test_sys_exit_on_a_rank_is_a_failure_of_it(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="SystemExit: 3"):
        ranks(f"{TARGETS}:exit_quietly", ranks=1)


def test_ranks_run_again_after_a_failure(ranks: Ranks) -> None:
    with pytest.raises(RankFailed):
        ranks(f"{TARGETS}:raise_while_others_wait", {"failing": 0}, ranks=2)
    assert [result["sum"] for result in ranks(f"{TARGETS}:add_up", ranks=2)] == [1.0, 1.0]


def test_a_lost_server_is_told_and_replaced(ranks: Ranks) -> None:
    def kill_the_server(rank: int, message: dict[str, Any]) -> None:
        stat = Path(f"/proc/{message['pid']}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)

    with pytest.raises(RankFailed, match="the process that starts ranks ended"):
        ranks(f"{TARGETS}:until_stopped", ranks=1, on_message=kill_the_server)
    assert ranks(f"{TARGETS}:add_up", ranks=1)[0]["sum"] == 0.0


def test_a_rank_that_never_enters_is_named_with_collective_phase_and_time(ranks: Ranks) -> None:
    with pytest.raises(RankHung) as caught:
        ranks(f"{TARGETS}:never_enter", ranks=3, hang_after_s=2.0)
    message = caught.value.message
    assert caught.value.rank == 1
    assert message.startswith(
        "rank 1 is late: it has not entered all_reduce number 4 (axis world, phase gradient), which rank "
    )
    assert " s ago; rank 1 is at targets.py:" in message
    assert "in compute_without_end (no new collective for " in message


def test_a_stopped_process_is_named_as_stopped(ranks: Ranks) -> None:
    with pytest.raises(RankHung) as caught:
        ranks(f"{TARGETS}:never_enter", {"signal": int(signal.SIGSTOP)}, ranks=2, hang_after_s=2.0)
    assert caught.value.rank == 1
    assert "is stopped (SIGSTOP" in caught.value.message
    assert "rank 0 has waited for it in all_reduce number 4 (axis world, phase gradient) for" in caught.value.message


def test_a_long_computation_within_the_time_allowed_is_no_hang(ranks: Ranks) -> None:
    assert ranks(f"{TARGETS}:compute_long", {"seconds": 3.0}, ranks=2, hang_after_s=6.0) == ["done", "done"]


PARENT = """
import json, sys
from shoal.launch import run_ranks

def tell(rank, message):
    print(json.dumps({"rank": rank, **message}), flush=True)

results = run_ranks("distributed.targets:until_stopped", json.loads(sys.argv[1]), ranks=2, on_message=tell)
print(json.dumps({"results": results}), flush=True)
"""


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_while_the_server_still_loads(tmp_path: Path, interrupts: int) -> None:
    # The listener is told "stopping" once the first has arrived; a second then comes before any rank is forked.
    code = PARENT.replace("    print(", SECOND_INTERRUPT + "    print(") if interrupts == 2 else PARENT
    code = code.replace("results = ", FIRST_INTERRUPT + "results = ")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, "{}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert '"event": "stopping"' in done.stdout
    assert ('"results": ["stopped", "stopped"]' in done.stdout) == (interrupts == 1)
    assert ("KeyboardInterrupt" in done.stderr) == (interrupts == 2)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


FIRST_INTERRUPT = """
import os, signal, threading
from shoal.launch import supervise
start = supervise.Supervision._start
def start_and_interrupt(self, rank, **options):
    start(self, rank, **options)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
supervise.Supervision._start = start_and_interrupt
"""
SECOND_INTERRUPT = """
    if message["event"] == "stopping":
        os.kill(os.getpid(), signal.SIGINT)
"""


class Parent:
    """A program of its own that runs two ranks until it is stopped."""

    def __init__(self, *, deaf: bool, directory: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "TMPDIR": str(directory),
        }
        command = [sys.executable, "-c", PARENT, '{"deaf": true}' if deaf else "{}"]
        self.directory = directory
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.ranks = [self.hears("at work")["pid"] for _ in range(2)]
        stat = Path(f"/proc/{self.ranks[0]}/stat").read_text()
        self.server = int(stat.rpartition(")")[2].split()[1])

    def hears(self, word: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert word in line, (line, self.process.stderr.read() if self.process.stderr and not line else "")
        found: dict[str, Any] = json.loads(line)
        return found

    def meeting_places(self) -> list[Path]:
        return list(self.directory.glob(f"{PREFIX}*"))

    def nothing_left_within(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if not any(_alive(pid) for pid in (*self.ranks, self.server)) and not self.meeting_places():
                return True
            time.sleep(0.02)
        return False


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    started = Parent(deaf=False, directory=tmp_path)
    yield started
    started.process.kill()
    started.process.communicate()


def test_ctrl_c_lets_ranks_end_by_themselves(parent: Parent) -> None:
    os.killpg(parent.process.pid, signal.SIGINT)  # As a terminal does: the parent, the server and the ranks.
    assert parent.hears("stopping")["rank"] == -1
    assert parent.hears("results")["results"] == ["stopped", "stopped"]
    assert parent.process.wait(10) == 0
    assert parent.nothing_left_within(5)


def test_sigterm_to_the_parent_lets_ranks_end_by_themselves(parent: Parent) -> None:
    parent.process.send_signal(signal.SIGTERM)
    parent.hears("stopping")
    assert parent.hears("results")["results"] == ["stopped", "stopped"]
    assert parent.process.wait(10) == 0


def test_a_second_ctrl_c_kills_deaf_ranks(tmp_path: Path) -> None:
    parent = Parent(deaf=True, directory=tmp_path)
    try:
        os.killpg(parent.process.pid, signal.SIGINT)
        parent.hears("stopping")
        os.killpg(parent.process.pid, signal.SIGINT)
        _, errors = parent.process.communicate(timeout=10)
        assert "KeyboardInterrupt" in errors
        assert parent.nothing_left_within(5)
    finally:
        parent.process.kill()


def test_a_killed_parent_takes_its_ranks_along(parent: Parent) -> None:
    parent.process.send_signal(signal.SIGKILL)
    assert parent.nothing_left_within(5)


def test_a_killed_server_takes_its_ranks_along_and_the_parent_says_so(parent: Parent) -> None:
    os.kill(parent.server, signal.SIGKILL)
    _, errors = parent.process.communicate(timeout=10)
    assert "the process that starts ranks ended" in errors
    assert parent.nothing_left_within(5)


def test_what_a_killed_parent_and_server_left_is_removed_by_the_next_run(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(parent.process.pid, signal.SIGSTOP)
    os.kill(parent.server, signal.SIGKILL)
    parent.process.kill()
    parent.process.wait(5)
    assert parent.meeting_places()
    monkeypatch.setattr(tempfile, "tempdir", str(parent.directory))
    run_ranks(f"{TARGETS}:echo", {"value": 1}, ranks=1)
    assert parent.nothing_left_within(1)


def test_a_living_runs_meeting_place_is_left_alone(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent.directory))
    run_ranks(f"{TARGETS}:echo", {"value": 1}, ranks=1)
    assert parent.meeting_places()


def test_no_shared_memory_is_left(ranks: Ranks) -> None:
    before = set(glob.glob("/dev/shm/*"))
    with pytest.raises(RankFailed):
        ranks(f"{TARGETS}:end_without_a_word", {"failing": 1, "signal": 9}, ranks=2)
    assert set(glob.glob("/dev/shm/*")) <= before
