"""The parent's watch over the ranks of one run, from the first fork to the end of the last.

It listens to each rank's line and to how its process ends. The first rank that fails ends them all and is
the one that is named; Ctrl-C asks them to stop, and a second one kills them. Whatever happens, none is left.

Where islands are named, one may be lost: a rank of it that is killed takes its island along, and the ranks that are
left are notified (`comm/losses.py`). The first island has the run's record, so it cannot be lost. Ranks may also come
to a run under way (`sessions.py`): those that were lost are started again, if that is wanted, and further ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.launch.failure import Failure, first_cause, from_exception, from_exit, from_hang
from shoal.launch.forkserver import ForkServer
from shoal.launch.sessions import COMING, taken_up, withdraw

OnMessage = Callable[[int, dict[str, Any]], None]

LOST = "lost"
"""The folder that names lost ranks, in the run's directory."""
LOST_FOLDER = "SHOAL_LOST"
"""The environment variable by which ranks find it; not set where the first lost rank ends the run."""
ECHO_S = 2.0
"""How long a failure that looks like an echo may wait for its cause to be reported."""
GRACE_S = 1.5
"""Between the request to end (SIGTERM) and the end (SIGKILL), once a rank has failed."""
LEAVE_S = 10.0
"""How long ranks may take to leave once all results are here."""
STARTS = 4
"""How often a rank is started in one run. One that ends again and again is given up on."""


@dataclass
class _Member:
    """One rank as the parent sees it."""

    rank: int
    order: dict[str, Any]
    link: socket.socket
    end: int
    received: bytearray = field(default_factory=bytearray)
    status: bytearray = field(default_factory=bytearray)
    pid: int | None = None
    ready: bool = False
    may_be_lost: bool = False
    """Whether it has come so far that others can go on without its island."""
    started_s: float = field(default_factory=time.time)
    coming: bool = False
    """Whether it is one that the others have not taken up yet."""
    done: bool = False
    result: Any = None
    ended: bool = False


class Supervision:
    """One call of run_ranks, from the first fork to the end of the last rank."""

    def __init__(
        self,
        orders: list[dict[str, Any]],
        on_message: OnMessage,
        directory: str,
        server: ForkServer,
        islands: Sequence[Sequence[int]] = (),
        sessions: Path | None = None,
        coming: Sequence[int] = (),
    ) -> None:
        """`islands`: ranks that may be lost together; without them the first lost rank ends the run. `sessions`: the
        folder of `sessions.py`, if lost ranks are started again; `coming`: ranks that come later, likewise started."""
        self._islands = [tuple(island) for island in islands]
        self._lost: dict[int, str] = dict.fromkeys(coming, "")
        """Ranks of lost islands, and why; and those that are not taken up yet."""
        self._sessions, self._coming = sessions, set(coming)
        self._starts: Counter[int] = Counter()
        self._on_message = on_message
        self._directory = directory
        self._server = server
        self._failures: list[Failure] = []
        self._interrupts = 0
        self._stopping = False
        self._released = False
        self._kill_at_s: float | None = None
        self._killed = False
        self._selector = selectors.DefaultSelector()
        tokens: dict[str, str] = {}
        for order in orders:
            # Ranks that meet at one place are of one job.
            variables = order["environment"]
            variables["SHOAL_TOKEN"] = tokens.setdefault(variables["SHOAL_RENDEZVOUS"], secrets.token_hex(16))
        self._orders = orders
        self._members: list[_Member] = []

    def run(self) -> list[Any]:
        with _interrupts_to(self._interrupt):
            try:
                for rank in range(len(self._orders)):
                    self._start(rank, coming=rank in self._coming)
                while not all(member.ended for member in self._members):
                    self._turn()
            finally:
                self._end_all()
        if self._interrupts > 1:
            raise KeyboardInterrupt
        cause = self._cause()
        if cause is not None:
            raise cause.error
        return [member.result for member in self._members]

    def _start(self, rank: int, *, coming: bool = False) -> None:
        order = self._orders[rank]
        if coming:
            # What the process before it failed of has been its end, not the run's.
            self._failures = [failure for failure in self._failures if failure.rank != rank]
            order = {**order, "environment": {**order["environment"], COMING: repr(time.time())}}
        self._starts[rank] += 1
        mine, theirs = socket.socketpair()
        with theirs:
            end = self._server.fork(link=theirs, directory=self._directory)
        mine.setblocking(False)
        member = _Member(rank, order, mine, end, coming=coming)
        for before in self._members[rank : rank + 1]:
            with contextlib.suppress(KeyError):
                self._selector.unregister(before.link)
            before.link.close()
            os.close(before.end)
        self._members[rank : rank + 1] = [member]
        self._selector.register(mine, selectors.EVENT_READ, lambda: self._hear(member))
        self._selector.register(end, selectors.EVENT_READ, lambda: self._hear_of(member))

    def _turn(self) -> None:
        for key, _ in self._selector.select(timeout=0.1):
            key.data()
        if self._interrupts and not self._stopping:
            self._stopping = True
            self._on_message(-1, {"event": "stopping"})
            self._signal(signal.SIGTERM, [member for member in self._members if member.ready])
        now_s = time.monotonic()
        if self._kill_at_s is None:
            cause = self._cause()
            if self._interrupts > 1:
                self._kill_at_s = now_s
            elif cause is not None and (not cause.is_echo or now_s > cause.at_s + ECHO_S):
                self._signal(signal.SIGTERM, [member for member in self._members if member.ready])
                self._kill_at_s = now_s + GRACE_S
            elif not self._released and all(member.done or member.rank in self._lost for member in self._members):
                self._released = True
                for member in self._members:
                    with contextlib.suppress(OSError):
                        member.link.send(b"end\n")
                # Those that were not taken up have nothing to leave.
                self._signal(signal.SIGKILL, [member for member in self._members if member.coming])
                self._kill_at_s = now_s + LEAVE_S
        elif not self._killed and (now_s >= self._kill_at_s or self._interrupts > 1):
            self._killed = True
            self._signal(signal.SIGKILL, self._members)
            for member in self._members:
                if member.pid is None:  # Not forked yet, and without an order it will end as soon as it is.
                    self._selector.unregister(member.end)
                    member.ended = True

    def _signal(self, number: signal.Signals, members: list[_Member]) -> None:
        with contextlib.suppress(OSError):  # The server has exited, and its ranks with it.
            self._server.signal([m.pid for m in members if m.pid is not None and not m.ended], number)

    def _cause(self) -> Failure | None:
        return first_cause(failure for failure in self._failures if failure.rank not in self._lost)

    def _interrupt(self) -> None:
        self._interrupts += 1

    def _hear(self, member: _Member) -> None:
        """Reads the messages that the rank has sent so far."""
        line_ended = False
        while True:
            try:
                data = member.link.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(member.link)
                break
            member.received += data
            line_ended |= b"\n" in data
        if line_ended:  # Not looked for in all of a long line each time a piece of it comes.
            *lines, rest = bytes(member.received).split(b"\n")
            member.received = bytearray(rest)
            for line in lines:
                self._take(member, *json.loads(line))

    def _take(self, member: _Member, kind: str, content: Any) -> None:
        if kind == "say":
            self._on_message(member.rank, content)
        elif kind == "result":
            member.done, member.result = True, content
        elif kind == "failed":
            self._failures.append(from_exception(member.rank, content))
        elif kind == "hung":
            self._failures.append(from_hang(member.rank, content, time.monotonic()))
        elif kind == "may be lost":
            member.may_be_lost = True
            if member.coming:
                member.coming = False
                self._lost.pop(member.rank, None)
        elif kind == "must stay":
            member.may_be_lost = False
        elif kind == "ready":
            member.ready = True
            if self._stopping:
                self._signal(signal.SIGTERM, [member])

    def _hear_of(self, member: _Member) -> None:
        """Reads what the server reports about the rank's process: its pid, then its exit status."""
        data = os.read(member.end, 64)
        member.status += data
        numbers = [int(line) for line in bytes(member.status).split(b"\n")[:-1]]
        if numbers and member.pid is None:
            member.pid = numbers[0]
            member.link.setblocking(True)
            with contextlib.suppress(OSError):
                member.link.sendall(json.dumps(member.order).encode() + b"\n")
            member.link.setblocking(False)
        if len(numbers) == 2 or not data:
            self._selector.unregister(member.end)
            self._hear(member)
            member.ended = True
            failed = any(failure.rank == member.rank for failure in self._failures)
            if member.coming:
                self._came_in_vain(member)
            elif not member.done and not failed and self._kill_at_s is None:
                code = numbers[1] if len(numbers) == 2 else None
                failure = from_exit(member.rank, code, time.monotonic())
                if code is not None and code < 0:
                    self._lose_island(member.rank, str(failure.error))
                if member.rank not in self._lost:
                    self._failures.append(failure)
            if member.rank in self._lost and not member.coming:
                (Path(self._directory) / LOST / str(member.rank)).write_text(self._lost[member.rank])
            self._start_again(member.rank)

    def _start_again(self, rank: int) -> None:
        """Starts the ranks of a lost island again, once all of them have ended."""
        if self._sessions is None or self._kill_at_s is not None or rank not in self._lost:
            return
        island = next((island for island in self._islands if rank in island), (rank,))
        if all(self._members[each].ended and self._starts[each] < STARTS for each in island):
            for each in island:
                self._start(each, coming=True)

    def _came_in_vain(self, member: _Member) -> None:
        """A rank has ended before it was taken up. Where the others wait for it already, the run ends."""
        assert self._sessions is not None
        if taken_up(self._sessions, member.rank, since_s=member.started_s) and self._kill_at_s is None:
            code = [int(line) for line in bytes(member.status).split(b"\n")[:-1]][1:]
            self._lost.pop(member.rank, None)
            self._failures.append(from_exit(member.rank, code[0] if code else None, time.monotonic()))
        withdraw(self._sessions, member.rank)

    def _lose_island(self, rank: int, reason: str) -> None:
        """Goes on without the island of a rank that was killed, if the others can."""
        island: Sequence[int] = next((island for island in self._islands if rank in island), ())
        others = [member for member in self._members if member.rank not in self._lost]
        for member in others:  # What they said before this rank was killed may not have been read.
            self._hear(member)
        if rank in self._lost or not island or 0 in island or not all(member.may_be_lost for member in others):
            return
        self._lost |= dict.fromkeys(island, reason)
        self._signal(signal.SIGKILL, [member for member in self._members if member.rank in island])

    def _end_all(self) -> None:
        """Whatever happened above: no rank is left, nor a descriptor."""
        self._signal(signal.SIGKILL, self._members)
        for member in self._members:
            member.link.close()  # A rank that is not forked yet will read nothing, and end.
            while member.pid is not None and not member.ended:
                member.ended = os.read(member.end, 64) == b""
            os.close(member.end)
        self._selector.close()
        with contextlib.suppress(OSError):
            self._server.forget(self._directory)


@contextlib.contextmanager
def _interrupts_to(call: Callable[[], None]) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into calls while the block runs, where no other handler is set."""

    def handler(number: int, frame: FrameType | None) -> None:
        call()

    claimed: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    if threading.current_thread() is not threading.main_thread():
        claimed = {}
    replaced = [number for number, default in claimed.items() if signal.getsignal(number) is default]
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, claimed[number])
