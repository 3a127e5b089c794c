"""Rounds with a quorum (Decoupled DiLoCo, arXiv 2604.21428): no island waits for one that is late or lost.

The first island keeps the centre of all: the anchor and the state of the outer optimiser. A fragment's rounds are
numbered by the ends of its periods, and a version of its anchor is the rounds that are merged in it. An island sends
its move, how far it is from the anchor that it has, when it passes the end of a period, and takes the next anchor
`overlap` steps later. Moves are merged

    when all islands that are left have sent theirs,
    or when a quorum has and the next anchor is asked for, after a grace of so many times the time of a step,

so the slack that overlap leaves is there for late ones too. A move that comes after its round was merged is dropped.
Whoever was late or away takes the present anchor, and with the next ticket (`tickets.py`) the learning rate and the
place in the data.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shoal.comm.backend import ShoalGroup
from shoal.comm.ledger import BOOK
from shoal.comm.pairs import PackedMessage
from shoal.parallel.sync.fragments import sent_after
from shoal.parallel.sync.office import PULL, PULLS, PUSH, PUSHES, WAIT
from shoal.parallel.sync.rounds import Lengths
from shoal.strategy.terms.sync import MOVE_NUMBERS

if TYPE_CHECKING:
    from shoal.parallel.sync.averaged import Averaged, RoundPlan
    from shoal.parallel.sync.outer import OuterLevel

WAIT_S = 1e6


class Merging:
    """What the first island merges. Guarded by its office."""

    def __init__(self, level: OuterLevel) -> None:
        self.level = level
        self.term: Averaged = level.term  # type: ignore[assignment]
        self.members = set(range(level.islands.size))
        """Islands that were not lost."""
        self.merged: Counter[int] = Counter()
        """Moves in a merge -> how often."""
        self.late = 0
        """Moves that were dropped."""
        self.log: list[tuple[int, int, list[int]]] = []
        """(fragment, the version that was merged, islands)."""
        self.share_s = 0.0
        """The median time of a step, for the grace."""
        self._moves: dict[int, dict[int, tuple[float, Sequence[torch.Tensor]]]] = {}
        self._since: dict[int, float] = {}
        """When a fragment's quorum was complete."""

    def version(self, fragment: int) -> int:
        return int(self.level.kept.numbers[f"centre version {fragment}"])

    def room(self, fragment: int) -> PackedMessage:
        """For a move of a fragment, or its anchor, with a few numbers."""
        return PackedMessage(self.level.portions[fragment].empty(self.level.masters), numbers=MOVE_NUMBERS)

    def push(self, island: int, fragment: int, numbers: Sequence[float], move: Sequence[torch.Tensor]) -> None:
        """A move has arrived: numbers are the version of its anchor, what it was learned from, and the steps."""
        if int(numbers[0]) != self.version(fragment):
            self.late += 1
            return
        moves = self._moves.setdefault(fragment, {})
        moves[island] = self.term.plan.counts(numbers[1], numbers[2]) if numbers[2] else 0.0, move
        if len(moves) == self._quorum:
            self._since[fragment] = time.monotonic()
        self._merge_if_due(fragment, wanted=False)

    @property
    def _quorum(self) -> int:
        return min(self.term.plan.quorum, len(self.members))

    def pull(self, fragment: int, version: int) -> PackedMessage | None:
        """The anchor, if there is one after this version."""
        if self.version(fragment) <= version:
            self._merge_if_due(fragment, wanted=True)
        if self.version(fragment) <= version:
            return None
        message = self.room(fragment)
        portion = self.level.portions[fragment]
        for place, anchor in zip(portion.split(message.tensors), portion.views(self.level.kept["centre"]), strict=True):
            place.copy_(anchor)
        message.numbers[0] = self.version(fragment)
        return message

    def finish(self) -> None:
        """Merges all that is there."""
        for fragment in [fragment for fragment, moves in self._moves.items() if moves]:
            self._merge(fragment)

    def _merge_if_due(self, fragment: int, *, wanted: bool) -> None:
        moves = self._moves.get(fragment, {})
        if moves and set(moves) >= self.members:
            self._merge(fragment)
        elif wanted and len(moves) >= self._quorum:
            since = self._since.setdefault(fragment, time.monotonic())
            if time.monotonic() - since >= self.term.plan.grace * self.share_s:
                self._merge(fragment)

    def _merge(self, fragment: int) -> None:
        moves, level, version = self._moves.pop(fragment), self.level, self.version(fragment)
        moves = {island: move for island, move in moves.items() if move[0]}
        self._since.pop(fragment, None)
        level.kept.numbers[f"centre version {fragment}"] = version + 1
        self.log.append((fragment, version, sorted(moves)))
        self.merged[len(moves)] += 1
        if not moves:
            return
        portion, total = level.portions[fragment], sum(count for count, _ in moves.values())
        mean = [flat.zero_() for flat in portion.empty(level.masters)]
        lengths = Lengths(level, portion) if self.term.plan.merge == "radial" else None
        length = torch.zeros(len(portion.names), dtype=torch.float64)
        for island in sorted(moves):
            count, move = moves[island]
            if lengths is not None:
                own = lengths.of(move)
                lengths.divide(move, own)
                length += own.cpu() * (count / total)
            for flat, part in zip(mean, move, strict=True):
                flat.add_(part, alpha=count / total)
        if lengths is not None:
            lengths.divide(mean, lengths.of(mean), length)
        kept = {what: portion.views(level.kept[what]) for what in ("centre", *self.term.outer_state)}
        for at, move in enumerate(portion.split(mean)):
            mine = {what: views[at] for what, views in kept.items()}
            self.term.outer_step(move, {"anchor": mine.pop("centre"), **mine})


def passed(plan: RoundPlan, fragment: int, step: int) -> int:
    """The rounds of a fragment that are sent in so many steps."""
    return max(0, (step - sent_after(fragment, plan.fragments, plan.h)) // plan.h + 1)


def begin(term: Averaged, level: OuterLevel, step: int) -> None:
    """All islands stand at a step. A run that goes on from another scheme's has rounds behind it."""
    numbers = level.kept.numbers
    for p in range(term.plan.fragments):
        numbers[f"centre version {p}"] = max(numbers[f"centre version {p}"], passed(term.plan, p, step))
        numbers[f"version {p}"] = max(numbers[f"version {p}"], passed(term.plan, p, step - term.plan.overlap))


def turn(term: Averaged, level: OuterLevel, before: int, after: int) -> None:
    """This island, which stood at one step, stands at a later one now: what it sends and takes, in the same order on
    all islands. It takes part in every round, also where it learned nothing since the last one; those that were merged
    while it was away it leaves out."""
    plan, numbers = term.plan, level.kept.numbers
    for p in range(plan.fragments):
        numbers[f"count {p}"] += level.count
        numbers[f"steps {p}"] += level.steps
    level.count, level.steps = 0.0, 0
    due = []
    for p in range(plan.fragments):
        for kind, late in (("take", plan.overlap), ("send", 0)):
            for number in range(passed(plan, p, before - late), passed(plan, p, after - late)):
                end = sent_after(p, plan.fragments, plan.h) + number * plan.h
                second = "send" if plan.overlap else "take"
                due.append((end + late, kind == second, p, number, kind))
    for *_, p, number, kind in sorted(due):
        if number >= numbers[f"version {p}"]:
            _push(level, p) if kind == "send" else _pull(level, p)


def _push(level: OuterLevel, p: int) -> None:
    tickets, portion, numbers = level.tickets, level.portions[p], level.kept.numbers
    assert tickets is not None
    move = portion.empty(level.masters)
    rows = zip(portion.split(move), portion.views(level.kept["anchor"]), portion.views(level.masters), strict=True)
    for part, anchor, value in rows:
        part.copy_(anchor).sub_(value)
    about = [numbers[f"version {p}"], numbers[f"count {p}"], numbers[f"steps {p}"], 0.0]
    if numbers[f"steps {p}"]:
        tickets.note(("push", tickets.island, p, int(about[0]), 0))
    numbers[f"count {p}"] = numbers[f"steps {p}"] = 0.0
    office, group = tickets.office, level.islands.group
    if office is not None:
        assert office.merging is not None
        with office.changed:
            office.merging.push(0, p, about, move)
            office.changed.notify_all()
        return
    assert isinstance(group, ShoalGroup)
    message = PackedMessage(move, numbers=MOVE_NUMBERS).fill(about, move)
    with BOOK.during("outer"):
        tickets.tell(PUSHES, float(p))
        group._enter("send", message.vector.nbytes)
        tickets.sending.append(group.messages.send(0, PUSH + p, message.vector, background=True))
    tickets.moved.append(("pushed", p))


def _pull(level: OuterLevel, p: int) -> None:
    tickets, portion, numbers = level.tickets, level.portions[p], level.kept.numbers
    assert tickets is not None
    office, group, version = tickets.office, level.islands.group, int(numbers[f"version {p}"])
    if office is not None:
        merging = office.merging
        assert merging is not None
        message: PackedMessage = office.wait(lambda: merging.pull(p, version) or WAIT)
    else:
        assert isinstance(group, ShoalGroup)
        message = PackedMessage(portion.empty(level.masters), numbers=MOVE_NUMBERS)
        with BOOK.during("outer"):
            coming = group.messages.receive(0, PULL + p, message.vector, background=False)
            tickets.tell(PULLS, float(p), float(version))
            group._enter("recv", message.vector.nbytes)
            group.messages.wait(coming, WAIT_S)
        tickets.moved.append(("pulled", p))
    blend = level.term.plan.blend  # type: ignore[attr-defined]
    rows = zip(
        portion.split(message.tensors), portion.views(level.kept["anchor"]), portion.views(level.masters), strict=True
    )
    for new, anchor, value in rows:
        anchor.copy_(new)
        value.mul_(blend).add_(anchor, alpha=1 - blend) if blend else value.copy_(anchor)
    numbers[f"version {p}"] = float(message.numbers[0])
    tickets.note(("take", tickets.island, p, int(message.numbers[0]), 0))
    level.consistency.exchanged()
    level.consistency.stale(int(message.numbers[0]) - version - 1)
