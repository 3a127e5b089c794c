"""Losing ranks of a run: who is gone, and how those that are left agree on it.

The process that started the ranks writes the name of each rank that was killed into a folder, once the process has
ended. What all islands do together (an exchange, an evaluation, a checkpoint) counts only if every rank that is left
says that it was done; otherwise all of them undo it and do it again without the island that was lost. Ranks agree
through the job's store, which works while groups are broken; no collective is added.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shoal.comm.transport.link import PeerLost
from shoal.comm.transport.signed_store import SignedStore

T = TypeVar("T")

DECIDE_S = 10.0
"""How long the first rank waits to be told of a lost rank, once a connection broke."""
READ_S = 60.0


class Losses:
    """The ranks that are left, as one of them sees it. Rank 0 is never lost: it decides."""

    def __init__(self, folder: Path, store: SignedStore, rank: int, islands: Sequence[Sequence[int]]) -> None:
        self.folder, self.store, self.rank = folder, store, rank
        self.islands = [tuple(island) for island in islands]
        """Those that are left: ranks that are lost together."""
        self.times: list[dict[str, float]] = []
        """For each loss: the seconds from the end of the process until it was noticed here, and until the others had
        agreed on it and made new groups."""
        self.done: Callable[[], None] = lambda: None
        """Called when something was done by all."""
        self._round = 0

    def together(
        self,
        act: Callable[[], T],
        *,
        undo: Callable[[], None],
        lose: Callable[[list[int], str], None],
        break_off: Callable[[], None] = lambda: None,
    ) -> T:
        """Does `act` with all ranks that are left; where ranks are lost meanwhile, `undo`, `lose` and `act` again. The
        first to notice breaks off what it does, so that no rank waits for it."""
        while True:
            result, error = None, None
            try:
                result = act()
            except Exception as caught:
                error = caught
            noticed_s = time.time()
            if isinstance(error, PeerLost):
                break_off()
            if self._all_done(not isinstance(error, PeerLost)):
                if error is not None:
                    raise error
                self.done()
                return result  # type: ignore[return-value]
            lost, reason = self._decide()
            if not lost:
                raise error if error is not None else PeerLost(-1, "another rank lost a connection")
            self.islands = [island for island in self.islands if not set(island) & set(lost)]
            undo()
            lose(lost, reason)
            ended_s = min(path.stat().st_mtime for path in self.folder.iterdir() if int(path.name) in lost)
            self.times.append(
                {
                    "detection_s": max(0.0, noticed_s - ended_s),
                    "agreement_s": time.time() - max(noticed_s, ended_s),
                }
            )

    def _reported(self) -> dict[int, str]:
        """Lost ranks -> why, as far as this is known here."""
        found = {int(path.name): path.read_text() for path in self.folder.iterdir()}
        return {rank: why for rank, why in found.items() if why}  # A file without text is still being written.

    def _all_done(self, done: bool) -> bool:
        """Whether every rank that is left is done. A lost rank's last word counts, if there is one: all that are left
        find the same."""
        self._round += 1
        self.store.set(f"done/{self.rank}", f"{self._round} {int(done)}")
        waiting = {rank for island in self.islands for rank in island} - {self.rank}
        pause_s = 0.0005
        while True:
            lost = self._reported()  # Before the look at the store: nothing new comes from these.
            for rank in sorted(waiting):
                number, their = map(int, (self.store.look(f"done/{rank}") or "0 0").split())
                if number >= self._round:
                    # Who is ahead has found that all were done.
                    done = done and bool(their or number > self._round)
                if number >= self._round or rank in lost:
                    waiting.discard(rank)
            if not waiting:
                return done
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _decide(self) -> tuple[list[int], str]:
        """The ranks that are lost, whole islands, and why; none if no rank is."""
        key = f"lost/{self._round}"
        if self.rank == 0:
            end_s = time.monotonic() + DECIDE_S
            found: tuple[list[int], str] = ([], "")
            while not found[0] and time.monotonic() < end_s:
                reported = self._reported()
                gone = [island for island in self.islands if set(island) & set(reported)]
                first = next((reported[rank] for island in gone for rank in island if rank in reported), "")
                found = [rank for island in gone for rank in island], first
                time.sleep(0.01)
            self.store.set(key, json.dumps(found))
        ranks, reason = json.loads(self.store.get(key, DECIDE_S + READ_S))
        return ranks, reason
