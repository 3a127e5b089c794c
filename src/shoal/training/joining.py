"""Ranks that come to a run under way: those of a lost island that were started again, and those of new replicas.

They are taken up where all replicas stand at one step, evaluate or save. All write a checkpoint there and leave their
process groups; the session that follows (`launch/sessions.py`) begins with the groups of all, old and new, from that
checkpoint. So who comes has the parameters, the outer state, the learning rate and the place in the data of the others,
by the same way as a run that is resumed; no step is made twice and no sample is left out. Processes stay: a survivor
keeps what it has loaded.

Island state that is private goes on in its island. Who comes is a copy of the first island.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.save import CheckpointFailed
from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.launch import sessions
from shoal.launch.supervise import LOST_FOLDER
from shoal.launch.watch import beat
from shoal.parallel.consistency import Consistency
from shoal.strategy import Strategy, parse
from shoal.strategy.islands import islands
from shoal.training.growing import grown, read_join
from shoal.training.options import TrainOptions

if TYPE_CHECKING:
    from shoal.training.loop import TrainingRun

COUNTS = ("updates", "gradients", "dropped", "repeated")
"""What servers count, to be added up over sessions."""


@dataclass
class Past:
    """What one process knows of the sessions of its run so far."""

    number: int = 0
    """Of the session."""
    lost: list[dict[str, Any]] = field(default_factory=list)
    recovery: list[dict[str, Any]] = field(default_factory=list)
    """For each loss, and for ranks that came: what it cost."""
    consistency: Consistency | None = None
    served: dict[str, Any] = field(default_factory=dict)
    copied_s: float = 0.0
    """How long the checkpoint took from which this session goes on, to be written."""
    paused_at_s: float | None = None
    """When the session before stopped."""

    def add_served(self, report: dict[str, Any]) -> dict[str, Any]:
        """What servers, or replicas in one memory, counted in all sessions."""
        before = self.served
        for what, counted in report.items():
            found = before.get(what, {})
            for name in COUNTS:
                if name in counted and name in found:
                    counted[name] += found[name]
            for name in ("lost_workers",):
                if name in counted or name in found:
                    counted[name] = [*found.get(name, ()), *counted.get(name, ())]
            if "staleness_max" in found and "staleness_max" in counted:
                made = counted["gradients"]
                earlier = found["gradients"]
                mean = counted["staleness_mean"] * (made - earlier) + found["staleness_mean"] * earlier
                counted["staleness_mean"] = mean / made if made else 0.0
                counted["staleness_max"] = max(counted["staleness_max"], found["staleness_max"])
        self.served = report or before
        return self.served


def come(rank: int) -> int:
    """On every rank at its start: the number of its first session. One that comes later waits for it here."""
    since_s = sessions.coming_since()
    if since_s is None:
        return 0
    now_s, before = time.time(), sessions.newest()
    sessions.report_ready(rank, {"warmup_s": now_s - since_s, "ready_at_s": now_s})
    return sessions.await_session(rank, beat, after=before)


def in_session(options: TrainOptions, number: int) -> TrainOptions:
    """The options of a session, and this process as one of its ranks."""
    found = sessions.session(number)
    if not number or found is None:
        return options
    sessions.enter(number, found["world"])
    return replace(
        options,
        resume=found["resume"],
        strategy=found["strategy"],
        checked=True,
        go_on=False,
        gate=False,
    )


def goes_on_from(number: int, island: int) -> tuple[int, int] | None:
    """The island of the checkpoint that one goes on from, as (number, of how many)."""
    found = sessions.session(number) if number else None
    return None if found is None else (found["sources"][island], found["saved_islands"])


class Joining:
    """Whether ranks wait to be taken up, as one rank of a session sees it."""

    def __init__(self, run: TrainingRun, past: Past) -> None:
        self.run, self.past = run, past
        self.enabled = bool(os.environ.get(sessions.SESSIONS_FOLDER))
        self.asked = read_join(run.options.join) if self.enabled else None
        self.ends = False
        """Whether the session ended for one with more ranks."""
        if past.consistency is not None:
            run.engine.consistency = past.consistency
            if run.engine.outer is not None:
                run.engine.outer.consistency = past.consistency
        past.consistency = run.engine.consistency

    def begin(self) -> None:
        """The first step of the session is next."""
        came(self.run, self.past)

    def _wanted(self) -> list[int]:
        """The ranks that are to come by now; the same on all ranks."""
        if not self.enabled:
            return []
        run, found = self.run, []
        if run.options.rejoin:
            found += run.lost.ranks
        strategy: Strategy = run.ready.strategy
        if self.asked is not None and self.asked.step <= run.step + 1 and not self._has_grown:
            found += range(strategy.world, grown(strategy, self.asked.replicas).world)
        return sorted(found)

    @property
    def _has_grown(self) -> bool:
        found = sessions.session(self.past.number)
        return bool(found and found["grown"])

    def take_up(self) -> bool:
        """After a step: whether the session ends here, for one with more ranks. Collective."""
        run, wanted = self.run, self._wanted()
        evaluates, saves = run.job.evaluate_every or 0, run.saving.every
        if not wanted or not (run.pace.due(run.step, evaluates) or run.pace.due(run.step, saves)):
            return False  # Not all stand together, or not all know of the same losses.
        began_s = time.time()
        with BOOK.during("agreement"):
            first = run.lost.together(self._all_ready)
        BOOK.take()
        if not first["ready"] or self._wanted() != wanted:
            return False
        run.channel.forbid_loss()
        try:
            if run.saving.saved_step != run.step:
                run.saving.save(final=True)
        except CheckpointFailed as error:
            run.warn(f"{str(error).rstrip('.')}; who wants to join waits for the next checkpoint")
            run.channel.allow_loss()
            return False
        self.past.copied_s, self.past.paused_at_s = time.time() - began_s, began_s
        if run.rank == 0:
            self._announce(wanted, first["facts"])
        self.ends = True
        return True

    def _all_ready(self) -> dict[str, Any]:
        mine: dict[str, Any] = {}
        if self.run.rank == 0:
            wanted, ready = self._wanted(), sessions.ready_ranks()
            facts = {str(rank): ready.get(rank) for rank in wanted}
            mine = {"ready": all(rank in ready for rank in wanted), "facts": facts}
        return exchange(mine, self.run.engine.placement.survivors)[0]

    def _announce(self, wanted: list[int], facts: dict[str, Any]) -> None:
        run = self.run
        strategy = run.ready.strategy
        grows = any(rank >= strategy.world for rank in wanted)
        following = grown(strategy, self.asked.replicas) if grows and self.asked is not None else strategy
        before, after = islands(strategy), islands(following)
        left = [at for at, island in enumerate(before) if not set(island) & set(run.lost.ranks)]
        # Who comes is a copy of the first island.
        sources = [left.index(at) if at in left else 0 for at in range(len(after))]
        folder = os.environ.get(LOST_FOLDER)
        path = run.folder / "checkpoints" / f"step-{run.step:08d}"
        sessions.announce(
            self.past.number + 1,
            {
                "coming": wanted,
                "resume": str(path),
                "strategy": str(following),
                "world": following.world,
                "sources": sources,
                "saved_islands": len(left),
                "grown": grows or self._has_grown,
                "facts": facts,
                "step": run.step,
            },
            lost=None if folder is None else Path(folder),
        )


def came(run: TrainingRun, past: Past) -> None:
    """On the first rank, when the first step of a session begins: what it took."""
    found = sessions.session(past.number) if past.number else None
    if found is None or past.paused_at_s is None or run.rank:
        return
    now_s = time.time()
    ready = [each["ready_at_s"] for each in found["facts"].values()]
    lost_at = {rank: row["step"] for row in past.lost for rank in row["ranks"]}
    ranks = found["coming"]
    steps = [found["step"] - lost_at[rank] for rank in ranks if rank in lost_at]
    row = {
        "came": ranks,
        "step": found["step"],
        "missed_steps": max(steps, default=0),
        "warmup_s": max(each["warmup_s"] for each in found["facts"].values()),
        "waited_s": max(0.0, past.paused_at_s - max(ready)),
        "copying_s": past.copied_s + run.restored_s,
        "pause_s": now_s - past.paused_at_s,
    }
    past.paused_at_s = None
    past.recovery.append(row)
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    text = f"{names} joined at step {row['step']}; the others paused for {row['pause_s']:.2f} s"
    run.channel.say({"event": "joined", **row, "text": text})


def strategy_of(options: TrainOptions) -> Strategy:
    return parse("serial" if options.strategy is None else options.strategy)
