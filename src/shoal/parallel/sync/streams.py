"""The rounds of an `Averaged` scheme on one rank: which fragments leave and arrive after a step, and what they do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist

from shoal.comm.compress.method import Method
from shoal.comm.ledger import BOOK
from shoal.parallel.sync.compressed import CompressedMoves
from shoal.parallel.sync.fragments import Portion, fragments_of
from shoal.parallel.sync.rounds import ArrivedMean, OuterRound

if TYPE_CHECKING:
    from shoal.parallel.sync.averaged import Averaged
    from shoal.parallel.sync.outer import OuterLevel

PHASE = "outer"


def after_update(scheme: Averaged, level: OuterLevel, step: int, *, stop: bool) -> bool:
    """After the update of a step, counted from 1; whether all islands stop here."""
    plan = scheme.plan
    if step <= plan.start:
        level.count, level.steps = 0.0, 0
        for anchor, value in zip(level.kept["anchor"], level.masters, strict=True):
            anchor.copy_(value)
        return stop
    if not plan.plain:
        for p in range(plan.fragments):
            level.kept.numbers[f"count {p}"] += level.count
            level.kept.numbers[f"steps {p}"] += 1
        level.count, level.steps = 0.0, 0
    stopping = False
    for p in plan.applied(step) if plan.overlap else ():
        if level.kept.numbers[f"flying {p}"]:
            stopping |= Stream(scheme, level, p).apply()
    for p in plan.sent(step):
        stream = Stream(scheme, level, p)
        if plan.overlap:
            stream.send(stop)
        elif plan.eager:
            stopping |= stream.go_on(stop)
        else:
            stopping |= stream.exchange(stop, number=(step - 1) // plan.h)
    return stopping


def lay_out(scheme: Averaged, level: OuterLevel, method: Method | None, *, seed: int) -> None:
    """Before the first step: which of this rank's slices belong to each fragment, and the codec of each. Collective."""
    parts = fragments_of(level.names, scheme.plan.fragments)
    _require_agreement(level, parts)
    level.portions = [Portion(names, level.buckets) for names in parts]
    if method is not None and level.islands.size > 1:
        level.codecs = [CompressedMoves(level, portion, method, seed=seed) for portion in level.portions]


def _require_agreement(level: OuterLevel, parts: list[list[str]]) -> None:
    """Islands that sent different fragments in one round would wait for each other, or add up what does not belong
    together."""
    if level.islands.group is None or len(parts) == 1:
        return
    mine = float(crc32(json.dumps(parts).encode()))
    found = torch.tensor([mine, -mine], dtype=torch.float64, device=level.device)
    with BOOK.during("setup"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=level.islands.group)
    if found[0] != -found[1]:
        raise RuntimeError(
            f"{level.term}: islands divide the parameters into fragments differently, so their rounds do not match; "
            "build the same model, with the same parameter names in the same order, on all ranks"
        )


def settle(level: OuterLevel) -> None:
    """Waits for rounds on the wire: what they bring is kept until it is applied. Collective over islands."""
    for p in sorted(level.flights):
        Stream(level.term, level, p).collect()  # type: ignore[arg-type]


class Stream:
    """The rounds of one fragment."""

    def __init__(self, scheme: Averaged, level: OuterLevel, number: int) -> None:
        self.scheme, self.plan, self.level, self.number = scheme, scheme.plan, level, number
        self.portion = level.portions[number]

    def views(self, what: str) -> list[torch.Tensor]:
        return self.portion.views(self.level.kept[what])

    @property
    def values(self) -> list[torch.Tensor]:
        return self.portion.views(self.level.masters)

    def moved(self) -> list[torch.Tensor]:
        """How far this island is from its anchor."""
        joined = self.portion.empty(self.level.masters)
        rows = zip(self.portion.split(joined), self.views("anchor"), self.values, strict=True)
        for move, anchor, value in rows:
            move.copy_(anchor).sub_(value)
        return joined

    def sent_before(self) -> list[torch.Tensor]:
        """How far it was when the round on the wire was sent."""
        joined = self.portion.empty(self.level.masters)
        for move, kept in zip(self.portion.split(joined), self.views("sent"), strict=True):
            move.copy_(kept)
        return joined

    def take_count(self) -> float:
        """What its move counts for, since the last round."""
        level, p = self.level, self.number
        if self.plan.plain:
            learned, steps = level.count, level.steps
            level.count, level.steps = 0.0, 0
            return self.plan.counts(learned, steps)
        numbers = level.kept.numbers
        found = self.plan.counts(numbers[f"count {p}"], numbers[f"steps {p}"])
        numbers[f"count {p}"] = numbers[f"steps {p}"] = 0.0
        return found

    def exchange(self, stop: bool, *, number: int) -> bool:
        """Sends and applies at once; `number`: of the fragment's rounds, from 0."""
        count, step = self.take_count(), number * self.plan.h + self.plan.h
        each = self._round(self.moved, count, stop, buffers=self.plan.plain, number=number)
        arrived = self._arrive(each)
        if arrived.buffers is not None:
            self.level.put_buffers(arrived.buffers)
        self._step(arrived.mean)
        if self.plan.state == "reset":
            self.level.reset_optimizer()
        if self.level.moments is not None:
            with BOOK.during(PHASE):
                self.level.moments.average(self.plan.moments(step), count)
        return arrived.stop

    def send(self, stop: bool) -> None:
        """Puts the move on the wire; it is applied later."""
        numbers, p = self.level.kept.numbers, self.number
        for kept, move in zip(self.views("sent"), self.portion.split(self.moved()), strict=True):
            kept.copy_(move)
        numbers[f"flying {p}"], numbers[f"sent count {p}"] = 1.0, self.take_count()
        each = self._round(self.sent_before, numbers[f"sent count {p}"], stop)
        with BOOK.during(PHASE):
            each.send()
        self.level.flights[p] = each

    def collect(self) -> None:
        """Waits for what is on the wire, and keeps it."""
        numbers, p = self.level.kept.numbers, self.number
        each = self.level.flights.get(p)
        if each is None:
            return  # It was collected before, perhaps into the checkpoint that this run began from.
        arrived = self._arrive(each)
        del self.level.flights[p]
        for kept, mean in zip(self.views("arriving"), self.portion.split(arrived.mean), strict=True):
            kept.copy_(mean)
        numbers[f"weight {p}"], numbers[f"stop {p}"] = arrived.weight, float(arrived.stop)

    def apply(self) -> bool:
        """Takes the round that was sent before."""
        self.collect()
        self.level.kept.numbers[f"flying {self.number}"] = 0.0
        self._step([view.clone() for view in self.views("arriving")], joined=False)
        return self._stops()

    def go_on(self, stop: bool) -> bool:
        """Eager: sends a round, and takes the one before with this island's part of it fresh."""
        numbers, p = self.level.kept.numbers, self.number
        known = bool(numbers[f"flying {p}"])
        if known:
            self.collect()
        weight = numbers[f"weight {p}"] if known else 1 / self.level.islands.size
        fresh = self.portion.split(self.moved())
        if known:
            rows = zip(fresh, self.views("sent"), self.views("arriving"), strict=True)
            mean = [(move - before).mul_(weight).add_(arrived) for move, before, arrived in rows]
        else:
            mean = [move * weight for move in fresh]
        stopping = known and self._stops()
        self.send(stop)
        self._step(mean, joined=False)
        return stopping

    def _stops(self) -> bool:
        return self.level.kept.numbers[f"stop {self.number}"] > 0

    def _round(self, moved: object, count: float, stop: bool, *, buffers: bool = False, number: int = 0) -> OuterRound:
        return OuterRound(
            self.level,
            self.portion,
            moved,  # type: ignore[arg-type]
            count=count,
            stop=stop,
            buffers=buffers,
            radial=self.plan.merge == "radial",
            codec=self.level.codecs[self.number] if self.level.codecs else None,
            number=number,
        )

    def _arrive(self, each: OuterRound) -> ArrivedMean:
        def wait() -> ArrivedMean:
            with BOOK.during(PHASE):
                return each.arrive()

        found = self.level.together(wait)
        self.level.consistency.exchanged(self.level.spread)
        return found

    def _step(self, mean: list[torch.Tensor], *, joined: bool = True) -> None:
        """The outer step, and this island's values after it."""
        moves = self.portion.split(mean) if joined else mean
        kept = {what: self.views(what) for what in ("anchor", *self.scheme.outer_state)}
        for at, (value, move) in enumerate(zip(self.values, moves, strict=True)):
            mine = {what: views[at] for what, views in kept.items()}
            self.scheme.outer_step(move, mine)
            if self.plan.blend:
                value.mul_(self.plan.blend).add_(mine["anchor"], alpha=1 - self.plan.blend)
            else:
                value.copy_(mine["anchor"])
