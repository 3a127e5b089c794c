"""Starts a script of the user's own on several ranks of this machine: `shoal launch script.py --ranks 2`.

The launcher itself hosts the rendezvous store, on loopback, the way torchrun's agent does: a script may call
Shoal's `join` or torch.distributed's init_process_group, and there is no moment in which another program
can take the port.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from shoal.launch.failure import signal_name

GRACE_S = 5.0
"""Between the request to end and the end, once a rank has failed."""

# Set before the script's own interpreter starts, and kept by it: ranks die with a launcher that is killed.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


class LaunchError(ValueError):
    """A script that cannot be started as asked."""


def launch_script(path: str, argv: Sequence[str], *, ranks: int, port: int | None = None) -> int:
    """Runs `python path argv...` on each rank; 0, or the exit status of the first that failed."""
    if ranks < 1:
        raise LaunchError(f"--ranks {ranks}: expected at least 1.")
    if not Path(path).is_file():
        raise LaunchError(f"there is no script {path}.")
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"--port {port}: expected a port from 1 to 65535.")
    from torch.distributed import TCPStore

    from shoal.launch.join import listen_on

    listener = listen_on(port or 0)
    port = int(listener.getsockname()[1])
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SHOAL_TOKEN": secrets.token_hex(16),
    }
    own = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_") and k != "SHOAL_RENDEZVOUS"}
    own.setdefault("OMP_NUM_THREADS", "1")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _forwarding(processes) as interrupted:
            for rank in range(ranks):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), path, *argv],
                        env={**own, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        # A terminal's Ctrl-C then comes to the launcher alone, which passes it on once.
                        process_group=0,
                    )
                )
            return _until_ended(processes, interrupted)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        del store


def _until_ended(processes: list[subprocess.Popen[bytes]], interrupted: list[int]) -> int:
    """Waits for all; the first failure ends the others."""
    failed: tuple[int, int] | None = None
    kill_at_s = float("inf")
    while any([process.poll() is None for process in processes]):  # Every one is polled: it is how they are reaped.
        if failed is None:
            failed = _failure(processes)
            if failed is not None:
                kill_at_s = time.monotonic() + GRACE_S
                _send(processes, signal.SIGTERM)
        if time.monotonic() > kill_at_s or len(interrupted) > 1:
            _send(processes, signal.SIGKILL)
        time.sleep(0.02)
    failed = failed or _failure(processes)
    if interrupted:
        return 128 + interrupted[0]
    if failed is None:
        return 0
    rank, code = failed
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit status {code}"
    others = "; the other ranks were ended" if len(processes) > 1 else ""
    print(f"shoal: rank {rank} {how}{others}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _failure(processes: list[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    ended = [(rank, process.returncode) for rank, process in enumerate(processes) if process.returncode]
    # Of several found at once a signal is the likelier cause: an exception takes its time to end a process.
    return min(ended, key=lambda item: (item[1] > 0, item[0]), default=None)


def _send(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


@contextlib.contextmanager
def _forwarding(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Passes SIGINT and SIGTERM on to the ranks; yields the signals that came."""
    came: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)
        _send(processes, number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)
