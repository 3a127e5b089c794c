"""A private Slurm of two nodes on loopback, for one test: a munge daemon, a controller and two node daemons."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")

CONFIGURATION = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """The first program that is not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    return next((name for name in PROGRAMS if shutil.which(name, path=path) is None), None)


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which srun finds the cluster."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-slurm-"))
    daemons: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": os.environ["PATH"] + ":/usr/sbin"}

    def start(*words: str) -> None:
        log = open(folder / "daemons.log", "ab")  # noqa: SIM115  (kept by the daemon)
        daemons.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True))

    try:
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        ports = [_free_port() for _ in range(3)]
        text = CONFIGURATION.format(host=socket.gethostname(), user=getuser(), folder=folder, ports=ports)
        (folder / "slurm.conf").write_text(text)
        files = {name: folder / f"munge.{name}" for name in ("key", "sock", "pid", "log", "seed")}
        start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={files['key']}",
            f"--socket={files['sock']}",
            f"--pid-file={files['pid']}",
            f"--log-file={files['log']}",
            f"--seed-file={files['seed']}",
        )
        _wait_for(lambda: files["sock"].exists(), folder)
        start("slurmctld", "-D")
        for node in ("n1", "n2"):
            start("slurmd", "-D", "-N", node)
        _wait_for(lambda: _idle(environment) == 2, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _idle(environment: dict[str, str]) -> int:
    shown = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle"], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    return len(shown.stdout.splitlines())


def _wait_for(condition, folder: Path, seconds: float = 40.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(path.read_text(errors="replace")[-800:] for path in folder.glob("*.log"))
            raise RuntimeError(f"Slurm did not start within {seconds:g} s:\n{logs}")
        time.sleep(0.1)
