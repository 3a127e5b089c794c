"""A process that has torch imported and forks ranks off itself, so that a rank starts in milliseconds.

The parent asks over a socket and hands over the file descriptors the rank shall use; the server answers on
a pipe per rank with its pid and, later, how it ended. When the parent has exited, for whatever reason, the server
kills its ranks, removes their directories and ends. The standard library's fork server would pickle the
work and run the user's main script again in every rank; this one does neither.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

READ_AT_START = ("MALLOC_", "GLIBC_", "LD_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH")
"""Variables that libraries read once, while they load: another value of one needs another server."""

REQUEST_BYTES = 65536


class ForkServer:
    """The parent's end of one server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._loaded: set[str] = set()
        self._has_forked = False
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = self._start(theirs, environment)
        finally:
            theirs.close()

    def _start(self, theirs: socket.socket, environment: Mapping[str, str]) -> Any:
        paths = [path or os.getcwd() for path in sys.path]
        code = (
            f"import sys; sys.path[:] = {paths!r}; from shoal.launch.forkserver import serve; serve({theirs.fileno()})"
        )
        # A Ctrl-C while the server still loads must not reach it; the mask is inherited, `serve` lifts it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", **environment},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def alive(self) -> bool:
        if self.owner != os.getpid() or self._process.poll() is not None:
            return False
        # The server sends nothing on this socket: readable means that the other end is closed. A killed process
        # closes its files before its exit can be waited for.
        return not select.select([self._link], [], [], 0)[0]

    def load(self, modules: Sequence[str]) -> None:
        """Asks for modules to be imported before the next rank is forked; each rank would import them by itself
        otherwise."""
        new = [name for name in modules if name not in self._loaded]
        if new:
            self._loaded.update(new)
            with contextlib.suppress(OSError):  # The server has exited; the next fork starts another.
                self._ask({"do": "load", "modules": new}, [])

    def fork(self, *, link: socket.socket, directory: str) -> int:
        """Starts a rank that holds `link`; returns the descriptor that receives its pid and its exit status."""
        self._has_forked = True
        read, write = os.pipe()
        streams = [_copy_of(number) for number in (1, 2)]
        try:
            self._ask({"do": "fork", "directory": directory}, [link.fileno(), write, *streams])
        except BaseException:
            os.close(read)
            raise
        finally:
            for descriptor in (write, *streams):
                os.close(descriptor)
        return read

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        """Sends a signal to ranks. The server does it: it alone knows that a pid is still the rank's own."""
        if pids:
            self._ask({"do": "signal", "pids": list(pids), "signal": int(number)}, [])

    def forget(self, directory: str) -> None:
        """Tells the server that the parent has removed this directory itself."""
        self._ask({"do": "forget", "directory": directory}, [])

    def _ask(self, request: dict[str, object], descriptors: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._link, [json.dumps(request).encode()], descriptors)

    def close(self) -> None:
        if self.owner != os.getpid():
            return
        self._link.close()
        if not self._has_forked:
            self._process.kill()  # It may still be loading, and has no rank to look after.
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}
_servers_lock = threading.Lock()
in_place_of_servers: ContextVar[ForkServer | None] = ContextVar("in_place_of_servers", default=None)
"""The server of all ranks that are started in a context, whatever their settings (`fork_of_caller.py`)."""


def server_for(environment: Mapping[str, str]) -> ForkServer:
    """The running server whose libraries were loaded under these settings, started if need be."""
    given = in_place_of_servers.get()
    if given is not None:
        return given
    key = tuple(sorted((name, value) for name, value in environment.items() if name.startswith(READ_AT_START)))
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.alive:
            if server is not None:
                server.close()
            server = _servers[key] = ForkServer(environment)
        return server


@atexit.register
def stop_servers() -> None:
    """Ends every server of this process, and with them any rank that is left."""
    with _servers_lock:
        for server in _servers.values():
            server.close()
        _servers.clear()


def _copy_of(number: int) -> int:
    """This process's own standard stream, or /dev/null where it has been closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def serve(descriptor: int) -> None:
    """The server's main: loads what ranks need, then forks one for each request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = os.getppid()
    link = socket.socket(fileno=descriptor)
    gc.disable()  # Nearly all that is made while modules load stays; to look for the rest takes a fifth of the time.
    from shoal.launch import rank

    _Server(link, parent).run(rank.main)
    os._exit(0)  # There is nothing to tidy up that the kernel does not.


class _Server:
    def __init__(self, link: socket.socket, parent: int) -> None:
        self._link = link
        self._parent = parent
        self._ends: dict[int, int] = {}
        self._directories: set[str] = set()

    def run(self, main: object) -> None:
        self._main = main
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        self._own = (woken, wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while True:
                # The timeout is for a parent whose end of the socket lives on in a fork of it.
                ready = [key.fileobj for key, _ in selector.select(timeout=1.0)]
                if woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
                    self._tell_ends()
                if self._link in ready and not self._answer(selector):
                    break
                if os.getppid() != self._parent:
                    break
        self._end()

    def _answer(self, selector: selectors.BaseSelector) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._link, REQUEST_BYTES, 8)
        except OSError:
            return False
        if not data:
            return False
        request = json.loads(data)
        if request["do"] == "fork":
            self._directories.add(request["directory"])
            gc.freeze()  # What is loaded now stays shared between the ranks.
            self._fork(descriptors, selector)
        elif request["do"] == "load":
            for name in request["modules"]:
                # A rank that imports it fails in the same way, and reports it.
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        elif request["do"] == "signal":
            for pid in request["pids"]:
                if pid in self._ends:
                    os.kill(pid, request["signal"])
        else:
            self._directories.discard(request["directory"])
        return True

    def _fork(self, descriptors: list[int], selector: selectors.BaseSelector) -> None:
        link, end, out, err = descriptors
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                gc.enable()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                self._link.close()
                for other in (*self._own, end, *self._ends.values()):
                    os.close(other)
                for target, source in ((1, out), (2, err)):
                    os.dup2(source, target)
                    os.close(source)
                self._main(socket.socket(fileno=link), server)  # type: ignore[operator]
                status = 0
            finally:
                os._exit(status)
        self._ends[pid] = end
        for descriptor in (link, out, err):
            os.close(descriptor)
        _tell(end, pid)

    def _tell_ends(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            end = self._ends.pop(pid, None)
            if end is not None:
                _tell(end, os.waitstatus_to_exitcode(status))
                os.close(end)

    def _end(self) -> None:
        for pid in self._ends:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._ends):
            os.waitpid(pid, 0)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)


def _tell(descriptor: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # The parent has exited; the next turn of the loop sees it.
        os.write(descriptor, b"%d\n" % number)
