"""Who moves the collectives along: whoever waits for one, or a worker while nobody does.

The collectives of a group run one after the other, in the order of their calls. A call moves its own as far as it gets
without waiting. `wait` drives the rest itself, without a change of threads; only what was asked for in the background,
and is not waited for yet, is driven by the group's worker, which starts with the first such call.

Waiting spins for a moment where every rank of the host has a core of its own, and otherwise sleeps at once: a rank
that spins on a core which its peer needs only delays itself. So the moment is halved each time it was in vain,
until it is not. A worker never spins, since it would hold the interpreter.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.comm.peers import Steps, Waits
from shoal.comm.transfer import Send
from shoal.comm.transport.link import Link, LinkAltered, PeerLost

SPIN_S = 300e-6
"""Longer than most waits between ranks in step, shorter than a time slice."""
HALVINGS, FULL_EVERY = 5, 16
"""How often the moment is halved, and which of the waits in vain has it whole again: waking up takes longer than a
short moment, so ranks that sleep in turns would never find out that they are in step again."""
GRACE_S = 2.0
"""How long a peer that nobody waits for may be gone before it is taken for the cause of the waiting."""
HAND_OVER_S = 0.05
"""How long to wait for the driver to make way before looking again."""
LOOK_S = 1.0
"""How often a sleeper looks around, whatever happens."""

MOST_SELECTED = 1024
"""Descriptors from here on are beyond what select takes."""

ranks_here = 1
"""Ranks of the job on this host, as far as known: the largest group seen."""


def note_ranks_here(count: int) -> None:
    global ranks_here
    ranks_here = max(ranks_here, count)


def may_spin() -> bool:
    return ranks_here <= len(os.sched_getaffinity(0))


class TimedOut(TimeoutError):
    """A collective did not end in time."""


class Task:
    """One collective under way."""

    __slots__ = ("_then", "done", "error", "steps", "what")

    def __init__(self, steps: Steps, what: str) -> None:
        self.steps = steps
        self.what = what
        self.done = False
        self.error: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.done = True
        while self._then:
            self._then.pop()()

    def when_done(self, call: Callable[[], None]) -> None:
        self._then.append(call)
        if self.done and call in self._then:
            self._then.remove(call)
            call()


class TaskQueue:
    """The tasks of one group, in order."""

    def __init__(self, links: Iterable[Link], name: str) -> None:
        self._links = list(links)
        self._name = name
        self._tasks: deque[Task] = deque()
        self._driver = threading.Lock()
        """Held by whoever moves the tasks along, also while it sleeps."""
        self._waiting: set[int] = set()
        """Threads that wait for a task: the worker makes way for them."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes the driver from its sleep."""
        self._worker: threading.Thread | None = None
        self._called = threading.Event()
        self._closed = False
        self._broken: BaseException | None = None
        self._in_vain = 0
        """Moments spun, one after the other, at the end of which there was nothing."""
        self._missed: dict[int, float] = {}
        """Peers whose end was seen while nothing was expected of them, and when."""

    def submit(self, task: Task, *, background: bool) -> Task:
        """Begins it, as far as that goes without waiting."""
        if self._broken is not None:
            raise self._broken
        self._tasks.append(task)
        if self._driver.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._driver.release()
        else:
            self._ring()
        if background and not task.done:
            self.call_worker()
        return task

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def wait(self, task: Task, timeout_s: float) -> None:
        """Until the task is done. Raises what went wrong."""
        deadline = time.monotonic() + timeout_s
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            while not task.done:
                if not self._driver.acquire(blocking=False):
                    self._ring()
                    if not self._driver.acquire(timeout=HAND_OVER_S):
                        continue
                try:
                    self._drive(task, deadline, spin=may_spin())
                    if not task.done and time.monotonic() > deadline:
                        self._give_up_on(task, TimedOut(f"{task.what} did not end within {timeout_s:g} s"))
                finally:
                    self._driver.release()
        finally:
            self._waiting.discard(me)
            if self._tasks and self._worker is not None:
                self.call_worker()
        if task.error is not None:
            raise task.error

    def _advance(self) -> Sequence[Waits]:
        """Runs tasks until one has to wait; what it waits for, or nothing if none is left."""
        while self._tasks:
            task = self._tasks[0]
            try:
                pending = next(task.steps)
            except StopIteration:
                self._tasks.popleft()
                task.finish()
            except Exception as error:
                self._fail(error)
            else:
                return pending
        return ()

    def _give_up_on(self, task: Task, error: BaseException) -> None:
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A stream that broke off in the middle of a message is of no more use, nor is what was to follow."""
        if isinstance(error, PeerLost) and not isinstance(error, LinkAltered) and self._missed:
            error = PeerLost(min(self._missed, key=self._missed.__getitem__))
        self._broken = error
        for link in self._links:
            link.take_back()
        while self._tasks:
            task = self._tasks.popleft()
            task.steps.close()
            failure = type(error)(*error.args) if not isinstance(error, PeerLost) else error
            task.finish(failure)

    def _drive(self, until: Task | None, deadline: float, *, spin: bool) -> None:
        slept = False
        spin_until = time.monotonic() + self.moment_s if spin else 0.0
        while self._tasks and not (until is not None and until.done):
            pending = self._advance()
            if not pending or (until is not None and until.done):
                break  # What else is under way is not what is waited for: its worker sees to it.
            now = time.monotonic()
            if now < spin_until:
                continue
            if now > deadline or self._closed:
                return
            self._in_vain += spin
            slept = True
            self._sleep(pending, min(LOOK_S, deadline - now))
            if until is None and self._waiting:
                return
            spin_until = time.monotonic() + self.moment_s if spin else 0.0
        if spin and not slept:
            self._in_vain = 0

    @property
    def moment_s(self) -> float:
        """How long to spin before sleeping."""
        return SPIN_S / (1 << min(HALVINGS, self._in_vain % FULL_EVERY))

    def _sleep(self, pending: Sequence[Waits], seconds: float) -> None:
        wanted: dict[Link, bool] = {}
        for transfer in pending:
            wanted[transfer.link] = wanted.get(transfer.link, False) or isinstance(transfer, Send)
        ready = [link.arm(to_write=to_write) for link, to_write in wanted.items()]
        if not any(ready):
            events = {self._bell: select.POLLIN}
            others = {}
            for link in self._links:
                if link in wanted:
                    writing = link.polls_writing and wanted[link]
                    events[link.fileno()] = select.POLLIN | (select.POLLOUT if writing else 0)
                elif link.peer not in self._missed:
                    others[link.fileno()] = link.peer
                    events[link.fileno()] = select.POLLRDHUP
            now = time.monotonic()
            due = min((at for link in wanted if (at := link.due()) is not None), default=None)
            if due is not None:
                seconds = min(seconds, max(0.0, due - now))
            for descriptor in _happened(events, seconds, to_the_microsecond=due is not None):
                if descriptor in others:
                    self._missed.setdefault(others[descriptor], now)
                elif descriptor == self._bell:
                    os.eventfd_read(self._bell)
            for peer, since in self._missed.items():
                if now - since > GRACE_S:
                    self._fail(PeerLost(peer))
                    break
        for link in wanted:
            link.disarm()

    def call_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=f"shoal {self._name}", daemon=True)
            self._worker.start()
        self._called.set()

    def _work(self) -> None:
        while not self._closed:
            self._called.wait()
            self._called.clear()
            # Who waits drives by itself, and calls again if something is left.
            while self._tasks and not self._waiting and not self._closed:
                with self._driver:
                    self._drive(None, time.monotonic() + LOOK_S, spin=False)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._broken = self._broken or RuntimeError(f"{self._name}: the group was closed, and its links with it")
        self._called.set()
        self._ring()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(timeout=2 * LOOK_S)
        os.close(self._bell)


def _happened(events: Mapping[int, int], seconds: float, *, to_the_microsecond: bool) -> list[int]:
    """Sleeps until one of the descriptors has its events, and says which have. Waiting to the microsecond, where poll
    rounds up to milliseconds, takes a few calls more."""
    if to_the_microsecond:
        with select.epoll() as all_of_them:
            if all_of_them.fileno() < MOST_SELECTED:
                for descriptor, mask in events.items():
                    all_of_them.register(descriptor, mask)
                select.select([all_of_them], [], [], seconds)
                return [descriptor for descriptor, _ in all_of_them.poll(0)]
    poll = select.poll()
    for descriptor, mask in events.items():
        poll.register(descriptor, mask)
    return [descriptor for descriptor, _ in poll.poll(1000 * seconds)]


def run(steps: Steps, links: Iterable[Link], *, timeout_s: float = 60.0) -> None:
    """One collective, waited for: what the tests and the calibration use."""
    line = TaskQueue(links, "once")
    line.wait(line.submit(Task(steps, "a collective"), background=False), timeout_s)
