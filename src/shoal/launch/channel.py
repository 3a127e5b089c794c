"""A rank's connection to the process that started it: messages up, a request to stop down.

Messages are lines of JSON on a socket. A message goes out at once if the socket takes it; what it does not
take is sent by a thread, so that a slow reader never holds up a step and nothing is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

from shoal.launch import join
from shoal.launch.engines import MPI
from shoal.launch.failure import signal_name
from shoal.launch.lateness import Verdict
from shoal.launch.watch import Watch

FOLLOW_S = 1.0
"""Between two looks at whether the launcher is there."""

Receiver = Callable[[dict[str, Any]], None]


class Line:
    """A socket that carries lines of JSON, written without ever waiting for the reader."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def write(self, kind: str, content: Any) -> None:
        data = json.dumps([kind, content]).encode() + b"\n"
        with self._lock:
            if not self._waiting:
                data = data[self._send_what_fits(data) :]
            if data:
                self._waiting.append(data)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._drain, name="shoal-channel", daemon=True)
                    self._thread.start()

    def _send_what_fits(self, data: bytes) -> int:
        try:
            return self._link.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # The reader has exited; there is no one to send to.

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                data = self._waiting[0]
            with contextlib.suppress(OSError):
                self._link.sendall(data)
            with self._lock:
                self._waiting.popleft()

    def flush(self, timeout_s: float | None = None) -> None:
        """Returns when everything written so far has been handed to the kernel."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)


class Channel:
    """One rank's line to its parent, or to a function where there is no parent of ours (under torchrun)."""

    def __init__(self, *, rank: int, world: int, line: Line | None = None, receiver: Receiver | None = None) -> None:
        self.rank = rank
        self.world = world
        self._line = line
        self._receiver = receiver
        self._stop = threading.Event()

    @property
    def is_local(self) -> bool:
        """Whether `run_ranks` started this rank and listens at the other end."""
        return self._line is not None

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to end its work early. Ranks may learn it in different steps."""
        return self._stop.is_set()

    def allow_loss(self) -> None:
        """From now on the others can go on without this rank's island."""
        if self._line is not None:
            self._line.write("may be lost", None)

    def forbid_loss(self) -> None:
        """From now on the others cannot, until it is allowed again."""
        if self._line is not None:
            self._line.write("must stay", None)

    def say(self, message: Mapping[str, Any]) -> None:
        """Sends a message of JSON values to the parent; without a parent, to the receiver of rank 0."""
        if self._line is not None:
            self._line.write("say", dict(message))
        elif self._receiver is not None and self.rank == 0:
            self._receiver(dict(message))

    def ask_to_stop(self) -> None:
        """From now on a stop is requested."""
        self._stop.set()

    def stop_on(self, *signals: signal.Signals) -> None:
        """From now on these signals ask for a stop instead of ending the process. Main thread only."""

        def handler(number: int, frame: FrameType | None) -> None:
            self._stop.set()

        for number in signals:
            signal.signal(number, handler)


def standalone_channel(*, on_message: Receiver | None = None, hang_after_s: float = 300.0) -> Channel:
    """The channel of a process that someone else started as a rank, such as torchrun; a watch runs in a thread.

    Rank 0's messages go to `on_message`. SIGTERM and Ctrl-C ask for a stop; while ranks still wait for each other, they
    end the process. So does the end of the launcher (its agent was killed): the ranks that are left stop with a
    checkpoint. A hang is printed and ends the process.
    """

    def report(verdict: Verdict) -> None:
        print(f"shoal: {verdict.message}", file=sys.stderr, flush=True)
        os._exit(1)

    channel = Channel(
        rank=int(os.environ.get("RANK", "0")),
        world=int(os.environ.get("WORLD_SIZE", "1")),
        receiver=on_message,
    )
    if threading.current_thread() is threading.main_thread():
        channel.stop_on(signal.SIGTERM, signal.SIGINT)
        _end_while_waiting((signal.SIGTERM, signal.SIGINT))
    # A signal is only a request here: a launcher could not end the ranks that are left, so they do.
    Watch(hang_after_s=hang_after_s, report=report, on_verdict_of_another=lambda: os._exit(1)).start()
    if any(name in os.environ for name in SUPERVISED):
        threading.Thread(target=_follow_launcher, args=(channel, os.getppid()), daemon=True).start()
    return channel


SUPERVISED = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", *(names.rank for names in MPI))
"""Variables of launchers that stay for as long as their ranks. (A shell that has started ranks by hand need not.)"""


def _end_while_waiting(signals: tuple[signal.Signals, ...]) -> None:
    """Ends the process at a signal for as long as it has not joined: nothing is trained yet that could be saved. Python
    runs handlers when the main thread comes back from a call into C, which may wait minutes for the rendezvous; the
    signal's number is written to a socket at once."""
    listens, writes = socket.socketpair()
    writes.setblocking(False)
    signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)

    def follow() -> None:
        while number := listens.recv(1):
            if number[0] in signals and join.current() is None:
                _end(f"{signal_name(number[0])} while ranks were connecting: stopped")
        writes.close()

    threading.Thread(target=follow, name="shoal-signals", daemon=True).start()


def _follow_launcher(channel: Channel, launcher: int) -> None:
    """Asks for a stop when the process that started this one has ended."""
    while os.getppid() == launcher:
        time.sleep(FOLLOW_S)
    why = f"rank {channel.rank}: its launcher (process {launcher}) has ended; stopping"
    if join.current() is None:
        _end(why)
    print(f"shoal: {why}", file=sys.stderr, flush=True)
    channel.ask_to_stop()


def _end(why: str) -> NoReturn:
    print(f"shoal: {why}", file=sys.stderr, flush=True)
    os._exit(130)
