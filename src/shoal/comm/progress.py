"""Drives the collectives of a group: by the thread that waits for one, or by a worker if no thread does.

The collectives of a group run one after the other, in call order. A call advances its collective as far as possible
without waiting. `wait` drives the rest itself, without a thread switch; only asynchronous collectives that no thread
waits for yet are driven by the group's worker, which starts with the first such call.

Waiting spins briefly if every rank of the host has a core of its own, and otherwise sleeps at once: a rank that spins
on a core which its peer needs only delays itself. So the spin time is halved after each spin without success, and reset
after a success. A worker never spins, because it would hold the interpreter lock.
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
from shoal.comm.waited import WAITED

SPIN_S = 300e-6
"""Longest spin: longer than most waits between ranks in step, shorter than a time slice."""
HALVINGS, FULL_EVERY = 5, 16
"""How often the spin time is halved, and after how many unsuccessful spins it is full again: waking up takes longer
than a short spin, so ranks that sleep alternately would never notice that they are in step again."""
GRACE_S = 2.0
"""Seconds that a peer with no pending transfer may be disconnected before it is considered the cause of a wait."""
HAND_OVER_S = 0.05
"""Seconds to wait for the driver lock before trying again."""
LOOK_S = 1.0
"""Longest sleep in seconds, even without an event."""

MOST_SELECTED = 1024
"""Descriptors from this number on cannot be used with select."""

ranks_here = 1
"""Ranks of the job on this host, as far as known: the size of the largest group."""


def note_ranks_here(count: int) -> None:
    global ranks_here
    ranks_here = max(ranks_here, count)


def may_spin() -> bool:
    return ranks_here <= len(os.sched_getaffinity(0))


class TimedOut(TimeoutError):
    """A collective did not complete in time."""


class Task:
    """One collective in progress."""

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


class _FirstOf:
    """Done when one of several tasks is."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    @property
    def done(self) -> bool:
        return any(task.done for task in self._tasks)


class TaskQueue:
    """The tasks of one group, in order."""

    def __init__(self, links: Iterable[Link], name: str) -> None:
        self._links = list(links)
        self._name = name
        self._tasks: deque[Task] = deque()
        self._driver = threading.Lock()
        """Held by the thread that drives the tasks, also while it sleeps."""
        self._waiting: set[int] = set()
        """Threads that wait for a task: the worker yields to them."""
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes the sleeping driver."""
        self._worker: threading.Thread | None = None
        self._called = threading.Event()
        self._closed = False
        self._broken: BaseException | None = None
        self._failed_spins = 0
        """Consecutive spins without success."""
        self._missed: dict[int, float] = {}
        """Peers that disconnected while no transfer with them was pending -> when."""

    def submit(self, task: Task, *, background: bool) -> Task:
        """Queues a task and advances it as far as possible without waiting."""
        if self._broken is not None:
            raise self._broken
        self._tasks.append(task)
        if self._driver.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._driver.release()
        else:
            self._wake()
        if background and not task.done:
            self.call_worker()
        return task

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def wait(self, task: Task, timeout_s: float) -> None:
        """Waits until the task is done; raises its error."""
        with WAITED:
            self._wait(task, timeout_s)

    def _wait(self, task: Task, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            while not task.done:
                if not self._driver.acquire(blocking=False):
                    self._wake()
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

    def wait_any(self, tasks: Sequence[Task], timeout_s: float) -> None:
        """Waits until one of the tasks is done, or the time is over; no task is given up on."""
        with WAITED:
            self._wait_any(tasks, timeout_s)

    def _wait_any(self, tasks: Sequence[Task], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        first, me = _FirstOf(tasks), threading.get_ident()
        self._waiting.add(me)
        try:
            while not first.done and time.monotonic() < deadline:
                if not self._driver.acquire(blocking=False):
                    self._wake()
                    if not self._driver.acquire(timeout=HAND_OVER_S):
                        continue
                try:
                    self._drive(first, deadline, spin=False)
                finally:
                    self._driver.release()
        finally:
            self._waiting.discard(me)
            if self._tasks and self._worker is not None:
                self.call_worker()

    def _advance(self) -> Sequence[Waits]:
        """Runs tasks until one has to wait; returns the transfers it waits for, or nothing if no task is left."""
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
        """Fails all tasks: a stream that broke in the middle of a message cannot be used again."""
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

    def _drive(self, until: Task | _FirstOf | None, deadline: float, *, spin: bool) -> None:
        slept = False
        spin_until = time.monotonic() + self.spin_s if spin else 0.0
        while self._tasks and not (until is not None and until.done):
            pending = self._advance()
            if not pending or (until is not None and until.done):
                break  # Other tasks in progress are left to the worker.
            now = time.monotonic()
            if now < spin_until:
                continue
            if now > deadline or self._closed:
                return
            self._failed_spins += spin
            slept = True
            self._sleep(pending, min(LOOK_S, deadline - now))
            if until is None and self._waiting:
                return
            spin_until = time.monotonic() + self.spin_s if spin else 0.0
        if spin and not slept:
            self._failed_spins = 0

    @property
    def spin_s(self) -> float:
        """How long to spin before sleeping."""
        return SPIN_S / (1 << min(HALVINGS, self._failed_spins % FULL_EVERY))

    def _sleep(self, pending: Sequence[Waits], seconds: float) -> None:
        wanted: dict[Link, bool] = {}
        for transfer in pending:
            wanted[transfer.link] = wanted.get(transfer.link, False) or isinstance(transfer, Send)
        ready = [link.arm(to_write=to_write) for link, to_write in wanted.items()]
        if not any(ready):
            events = {self._wakeup: select.POLLIN}
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
                elif descriptor == self._wakeup:
                    os.eventfd_read(self._wakeup)
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
            # A waiting thread drives the tasks itself, and calls the worker again if tasks are left.
            while self._tasks and not self._waiting and not self._closed:
                with self._driver:
                    self._drive(None, time.monotonic() + LOOK_S, spin=False)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._broken = self._broken or RuntimeError(f"{self._name}: the group was closed, and its links with it")
        self._called.set()
        self._wake()
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(timeout=2 * LOOK_S)
        os.close(self._wakeup)


def _happened(events: Mapping[int, int], seconds: float, *, to_the_microsecond: bool) -> list[int]:
    """Sleeps until one of the descriptors has its events; returns those that have. Microsecond precision, where poll
    rounds up to milliseconds, takes a few more system calls."""
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
    """Runs one collective to its end; used by tests and calibration."""
    queue = TaskQueue(links, "once")
    queue.wait(queue.submit(Task(steps, "a collective"), background=False), timeout_s)
