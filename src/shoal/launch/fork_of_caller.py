"""Ranks that are forks of the calling process, so that they have its objects: a Job that a notebook has defined.

Ranks of a command load the job's file again; an object has no file. Nothing is pickled: the server is a fork of this
process, made when the job is complete, and ranks are forks of that. It works on one host, and not once this process has
used a GPU: drivers do not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.launch.forkserver import ForkServer, in_place_of_servers, serve


class CannotFork(ValueError):
    """This process cannot become several ranks."""


@contextlib.contextmanager
def forking_this_process() -> Iterator[None]:
    """Ranks that are started in this context are forks of this process as it is now."""
    torch = sys.modules.get("torch")
    kind = torch.accelerator.current_accelerator(check_available=True) if torch is not None else None
    if kind is not None and torch is not None and torch.get_device_module(kind).is_initialized():
        raise CannotFork(
            f"a Job object is trained by forks of this process, and it has used its {kind.type} devices already, which "
            "do not survive a fork; put the job into a file (mine.py) and give that, or restart and train first"
        )
    server = _ForkOfCaller({})
    token = in_place_of_servers.set(server)
    try:
        yield
    finally:
        in_place_of_servers.reset(token)
        server.close()


class _ForkOfCaller(ForkServer):
    def _start(self, theirs: socket.socket, environment: Mapping[str, str]) -> Any:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # As for any server, while it loads.
        pid = os.fork()
        if pid == 0:
            try:
                self._link.close()
                # A notebook's own streams write through threads that a fork does not have.
                sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                serve(theirs.detach())
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return _Child(pid)


class _Child:
    """The part of `subprocess.Popen` that a server needs, for a fork."""

    def __init__(self, pid: int) -> None:
        self.pid, self.status = pid, None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """The server ends when its socket is closed: the kernel closes it with this process at the latest."""
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self.status is None:
            try:
                pid, status = os.waitpid(self.pid, how)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.status = os.waitstatus_to_exitcode(status)  # type: ignore[assignment]
        return self.status
