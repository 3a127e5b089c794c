"""A hang is named: a thread in each rank notices that nothing moves, and finds out which rank is late.

Ranks talk through the job's store, which works while the process group is stuck. Nothing is written there as
long as all goes well; when one rank has made no progress for too long it asks, the others answer, and
`lateness.py` judges. A store that does not answer (this host is cut off, or that of rank 0) is a verdict too: of a
second thread, since the first one waits for the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from shoal.comm import ledger
from shoal.comm.transport.signed_store import SignedStore
from shoal.launch import join
from shoal.launch.lateness import Entered, Report, Verdict, judge

TICK_S = 0.5
ANSWER_S = 4.0
"""How long a rank may take to answer: several ticks, on a machine that is busy."""
UNREACHABLE_S = 15.0
"""How long the store may take to answer once this rank has made no progress for too long."""
OTHERS_JUDGE_S = 15.0
"""How long the second rank that noticed waits for the first one's verdict to end the run."""

DEEPEST = 12
"""Calls that a report names, from the innermost."""

_ENGINES = (str(Path(torch.__file__).parent), str(Path(ledger.__file__).parent))
_STANDARD = sysconfig.get_path("stdlib")

_beats = 0


def beat() -> None:
    """Reports progress, where this rank works for long without a collective."""
    global _beats
    _beats += 1


class Watch:
    """The thread. `report` is called with the verdict and is expected to end the process."""

    def __init__(
        self,
        *,
        hang_after_s: float,
        report: Callable[[Verdict], None],
        on_verdict_of_another: Callable[[], None] = lambda: None,
    ) -> None:
        self._hang_after_s = hang_after_s
        self._report = report
        self._on_verdict_of_another = on_verdict_of_another
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-watch", daemon=True)
        self._place: join.Rank | None = None
        self._store: SignedStore | None = None
        self._answered = 0
        self._idle_s = 0.0
        self._done = False
        self._seen: tuple[int, dict[str, int]] = (0, {})
        self._turns = 0

    def start(self) -> Watch:
        self._thread.start()
        threading.Thread(target=self._guard, name="shoal-guard", daemon=True).start()
        return self

    def _guard(self) -> None:
        """Judges where the other thread cannot, since it waits in the store for an answer."""
        idle_s, stuck_s, before = 0.0, 0.0, (self._turns, self._progress())
        while not self._stop.wait(TICK_S):
            now = (self._turns, self._progress())
            stuck_s = 0.0 if now[0] != before[0] else stuck_s + TICK_S
            idle_s = 0.0 if now[1] != before[1] else idle_s + TICK_S
            before, place = now, join.current()
            if place is None or idle_s < self._hang_after_s or stuck_s < UNREACHABLE_S or self._done:
                continue
            message = (
                f"rank {place.rank} on {socket.gethostname()} made no progress for {idle_s:.0f} s, and the store at "
                f"{os.environ.get('MASTER_ADDR', 'rank 0')} has not answered for {stuck_s:.0f} s: one of the two hosts "
                "is cut off from the network, or the process that hosts the store is stopped"
            )
            self._report(Verdict(late=(), message=message))
            return

    def done(self) -> None:
        """The rank's work is over: it no longer judges, but it still answers."""
        self._done = True

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(TICK_S):
            now_s = time.monotonic()
            # Time in which this thread did not run either (Ctrl-Z, a suspended laptop) does not count as a hang.
            passed_s, before_s = min(now_s - before_s, 2 * TICK_S), now_s
            if self._moved():
                self._idle_s = 0.0
            else:
                self._idle_s += passed_s
            self._turns += 1
            # A store that fails means that the job is ending; the rank that ends it reports the reason.
            with contextlib.suppress(RuntimeError):
                self._tick()

    def _tick(self) -> None:
        place = join.current()
        if place is not None and place is not self._place and place.world > 1:
            self._place, self._answered = place, 0
            self._store = place.store.clone()  # The main thread may be waiting in its own.
        if self._store is None:
            return
        self._answer()
        if self._idle_s >= self._hang_after_s and not self._done and place is not None:
            self._judge()

    @staticmethod
    def _progress() -> tuple[int, dict[str, int]]:
        return _beats, {label: call.number for label, call in dict(ledger.BOOK.last).items()}

    def _moved(self) -> bool:
        now = self._progress()
        moved, self._seen = now != self._seen, now
        return moved

    def _answer(self) -> None:
        """Describes this rank to every rank that has asked since the last time."""
        assert self._place is not None
        assert self._store is not None
        asked = int(self._store.look("watch/asked") or 0)
        if asked and self._store.look("watch/verdict") is not None:
            self._on_verdict_of_another()
        for question in range(self._answered + 1, asked + 1):
            self._store.set(f"watch/{question}/{self._place.rank}", json.dumps(self._describe().to_json()))
        self._answered = max(self._answered, asked)

    def _judge(self) -> None:
        assert self._place is not None
        assert self._store is not None
        world, store, reports = range(self._place.world), self._store, dict[int, Report]()
        # Two ranks that ask at once ask the same question, and come to the same verdict.
        question = int(store.look("watch/asked") or 0) + 1
        store.set("watch/asked", str(question))
        self._answer()
        if question > 1 and not self._still_for(OTHERS_JUDGE_S, until=lambda: False):
            return

        def all_answered() -> bool:
            for rank in world:
                answer = None if rank in reports else store.look(f"watch/{question}/{rank}")
                if answer is not None:
                    reports[rank] = Report.from_json(json.loads(answer))
            return len(reports) == len(world)

        if not self._still_for(ANSWER_S, until=all_answered):
            return
        silent = {rank: self._process_of(rank) for rank in world if rank not in reports}
        verdict = judge(reports, silent)
        store.set("watch/verdict", json.dumps(verdict.message))
        self._report(verdict)

    def _still_for(self, seconds: float, *, until: Callable[[], bool]) -> bool:
        """Waits, answering others meanwhile; whether nothing has moved all that time."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not until() and not self._stop.wait(0.1):
            self._answer()
            self._turns += 1
            if self._moved():
                self._idle_s = 0.0
                return False
        return not self._stop.is_set()

    def _describe(self) -> Report:
        now_s = time.monotonic()
        known = {each.label: each for each in list(dist.distributed_c10d._world.pg_map) if hasattr(each, "label")}
        groups = {
            label: Entered(
                number=call.number,
                kind=call.kind,
                phase=call.phase,
                axis=known[label].axis,
                ago_s=now_s - call.since,
                members=tuple(dist.get_process_group_ranks(known[label])),
            )
            for label, call in dict(ledger.BOOK.last).items()
            if label in known
        }
        return Report(groups=groups, at=where_main_is(), idle_s=self._idle_s, done=self._done, stack=stack_of_main())

    def _process_of(self, rank: int) -> str:
        """What this host knows of a rank that does not answer."""
        assert self._store is not None
        host, pid = join.process_of(self._store, rank)
        if host != socket.gethostname():
            return f"it does not answer (process {pid} on {host}: stopped, exited, or cut off from the network)"
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return f"its process {pid} has exited"
        if state in "Tt":
            return f"its process {pid} is stopped (SIGSTOP, or a debugger)"
        return f"it does not answer (process {pid} runs code that does not let other threads run)"


def stack_of_main() -> tuple[str, ...]:
    """The calls of the main thread that are no library's, outermost first."""
    frame, found = sys._current_frames().get(threading.main_thread().ident or 0), []
    while frame is not None:
        if not _in_library(frame):
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found[:DEEPEST][::-1])


def where_main_is() -> str:
    """ "file.py:88 in function" for the main thread, at the innermost frame that is not a library's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    shown, innermost = frame, frame
    while shown is not None and _in_library(shown):
        shown = shown.f_back
    shown = shown or innermost
    if shown is None:
        return "an unknown place"
    code = shown.f_code
    return f"{Path(code.co_filename).name}:{shown.f_lineno} in {code.co_name}"


def _in_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    in_python = name.startswith(_STANDARD) and "site-packages" not in name
    return in_python or name.startswith(("<", *_ENGINES))
