"""Becoming a rank of a job that someone else started: torchrun, `shoal launch`, variables set by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.script import LaunchError, launch_script

Ranks = Callable[..., list[Any]]

SUM = """
import torch, torch.distributed as dist
from shoal.launch.join import join, leave
me = join(meet_s={meet_s})
value = torch.tensor([float(me.rank + 1)])
dist.all_reduce(value)
print(f"rank {{me.rank}} of {{me.world}} on {{me.backend}}: {{value.item()}}\\n", end="", flush=True)
leave()
"""


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    return number


def variables() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "SHOAL_TOKEN")}
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def test_alone_is_a_world_of_one() -> None:
    command = [sys.executable, "-c", SUM.format(meet_s=5)]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "rank 0 of 1 on shoal: 1.0\n", done.stderr


def by_variables(ranks: Ranks, port: int, *each: dict[str, object], meet_s: list[float]) -> list[dict[str, Any]]:
    """Ranks that join by variables alone; each may set its own over the common ones."""
    common = {"WORLD_SIZE": len(each), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SHOAL_TOKEN": "one"}
    settings = [{k: str(v) for k, v in (common | own).items()} for own in each]
    return ranks("distributed.targets:join_by_variables", {"each": settings, "meet_s": meet_s}, ranks=len(each))


def test_ranks_that_share_address_and_token_meet_and_listen_on_loopback_only(ranks: Ranks, port: int) -> None:
    found = by_variables(ranks, port, {"RANK": 1}, {"RANK": 0}, meet_s=[20, 20])
    assert [(each["rank"], each["sum"], each["backend"]) for each in found] == [
        (1, 3.0, "shoal"),
        (0, 3.0, "shoal"),
    ]
    # Rank 0 hosts the rendezvous store; links between ranks of a host listen nowhere.
    assert any(each["listens"] for each in found)
    assert {address for each in found for address in each["listens"]} == {"0100007F"}


def test_a_process_with_another_token_never_meets_the_job(ranks: Ranks, port: int) -> None:
    found = by_variables(ranks, port, {"RANK": 0}, {"RANK": 1, "SHOAL_TOKEN": "two"}, meet_s=[2, 1])
    assert found[0]["error"].startswith("rank 1 of 2 did not connect within 2 s.")
    assert found[1]["error"].startswith("rank 0 of 2 did not connect within 1 s.")
    assert "SHOAL_TOKEN" in found[0]["error"]


def test_two_processes_of_the_same_rank_are_told_apart(ranks: Ranks, port: int) -> None:
    found = by_variables(ranks, port, {"RANK": 0}, {"RANK": 1}, {"RANK": 1}, meet_s=[2, 1, 1])
    assert found[0]["error"].startswith("rank 2 of 3 did not connect")
    assert sum("two processes claim to be rank 1" in each["error"] for each in found[1:]) == 1


def test_a_meeting_place_that_closes_is_told_to_those_who_still_wait(ranks: Ranks, port: int) -> None:
    found = by_variables(ranks, port, {"RANK": 0, "WORLD_SIZE": 3}, {"RANK": 1, "WORLD_SIZE": 3}, meet_s=[1, 9])
    assert found[0]["error"].startswith("rank 2 of 3 did not connect within 1 s.")
    assert found[1]["error"].startswith("rank 1 lost the rendezvous while it waited for the others")


@pytest.mark.parametrize("address", ["127.0.0.1", socket.gethostname()])
def test_a_port_in_use_is_a_plain_sentence(ranks: Ranks, address: str) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = by_variables(ranks, number, {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address}, meet_s=[5])
    assert found[0]["error"].startswith(f"port {number} is in use by another program on this host.")


def test_a_meeting_place_nobody_holds_is_told(ranks: Ranks, port: int) -> None:
    found = by_variables(ranks, port, {"RANK": 1, "WORLD_SIZE": 2}, meet_s=[1])
    assert found[0]["error"].startswith(f"rank 1 could not reach the rendezvous 127.0.0.1:{port} within 1 s.")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"RANK": 0}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set, while RANK is"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK is 'one': expected a whole number"),
        ({"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 70000}, "MASTER_PORT is 70000: expected a port"),
        ({"RANK": -1, "WORLD_SIZE": 1}, "RANK is -1 and WORLD_SIZE 1"),
    ],
)
def test_variables_that_make_no_sense_are_named(
    own: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.launch import join

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"} if len(own) > 1 else {}
    with pytest.raises(join.JoinError, match=expected):
        join._meeting_place({**place, **{k: str(v) for k, v in own.items()}}, 1.0)


def torchrun_two(script: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=100, check=False)


def test_torchrun_with_join_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUM.format(meet_s=30))
    done = torchrun_two(script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == [
        "rank 0 of 2 on shoal: 3.0",
        "rank 1 of 2 on shoal: 3.0",
    ]


HANGS = """
import time, torch, torch.distributed as dist
from shoal.launch.channel import standalone_channel
from shoal.launch.join import join
standalone_channel(hang_after_s=1.5)
me = join()
dist.barrier()
time.sleep(600) if me.rank == 1 else dist.all_reduce(torch.ones(1))
"""


def test_under_torchrun_a_hang_is_printed_and_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGS)
    done = torchrun_two(script)
    assert done.returncode == 1
    assert "shoal: rank 1 is late: it has not entered all_reduce number 2 (axis world, phase setup)" in done.stderr
    assert "rank 1 is at script.py:8 in <module>" in done.stderr


PLAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1); dist.all_reduce(value)
with open(sys.argv[1] + os.environ["LOCAL_RANK"], "w") as file:
    file.write(f"{value.item()} {sys.argv[2]} {os.environ['LOCAL_WORLD_SIZE']}")
from shoal.launch.join import join, leave
me = join()
assert (me.rank, me.world, me.backend) == (dist.get_rank(), 2, "shoal")
leave()
dist.all_reduce(value)
dist.destroy_process_group()
"""


def test_a_script_may_call_torch_itself(tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.write_text(PLAIN)
    assert launch_script(str(script), [str(tmp_path / "out"), "--flag ü"], ranks=2) == 0
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["2.0 --flag ü 2"] * 2


def test_a_script_may_call_join(tmp_path: Path, port: int, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUM.format(meet_s=30))
    assert launch_script(str(script), [], ranks=2, port=port) == 0
    assert "rank 1 of 2 on shoal: 3.0" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("sys.exit(7)", 7, "failed with exit status 7"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_a_script_that_fails_on_one_rank_ends_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ending: str, status: int, words: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '1': {ending}\ntime.sleep(600)")
    start_s = time.monotonic()
    assert launch_script(str(script), [], ranks=3) == status
    assert time.monotonic() - start_s < 10
    assert f"shoal: rank 1 {words}; the other ranks were ended" in capfd.readouterr().err


def test_a_taken_port_is_told_before_a_script_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="is in use by another program"):
            launch_script(str(script), [], ranks=2, port=taken.getsockname()[1])
    assert not (tmp_path / "started").exists()


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match=r"no script nowhere\.py"):
        launch_script("nowhere.py", [], ranks=2)


LAUNCHER = """
import sys
from shoal.launch.script import launch_script
sys.exit(launch_script(sys.argv[1], [], ranks=2))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_of_a_script_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(script)],
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.send_signal(number)
    assert launcher.wait(10) == (130 if number == signal.SIGINT else -9)
    end_s = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
