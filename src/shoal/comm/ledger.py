"""The ledger: what was sent, by (axis, phase, kind of collective).

A Ledger is a plain value, counted by the process group (`comm/group.py`) and predicted by `estimate/traffic.py`
in the same form, so that the two can be compared entry by entry. The Book is the running count of a process; it also
knows the phase of the step and the last collective of each group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.wire import Algorithm, sent

PHASES = (
    "setup",
    "shapes",
    "agreement",
    "forward",
    "backward",
    "gradient",
    "optimizer",
    "loss",
    "outer",
    "evaluate",
    "checkpoint",
)


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """The key of an entry."""

    axis: str
    phase: str
    kind: str

    def __str__(self) -> str:
        return f"{self.axis}/{self.phase}/{self.kind}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Number of collectives, and the messages and bytes that this rank sent for them."""

    calls: int = 0
    messages: int = 0
    bytes: int = 0

    def __add__(self, other: Entry) -> Entry:
        return Entry(self.calls + other.calls, self.messages + other.messages, self.bytes + other.bytes)


@dataclass(frozen=True)
class Ledger:
    """What one rank sent, as a mapping from Key to Entry; ledgers add and compare."""

    entries: Mapping[Key, Entry] = field(default_factory=dict)

    def __add__(self, other: Ledger) -> Ledger:
        total = dict(self.entries)
        for key, entry in other.entries.items():
            total[key] = total.get(key, Entry()) + entry
        return Ledger(total)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    @property
    def calls(self) -> int:
        return sum(entry.calls for entry in self.entries.values())

    def by_axis(self) -> dict[str, Entry]:
        totals: dict[str, Entry] = {}
        for key, entry in self.entries.items():
            totals[key.axis] = totals.get(key.axis, Entry()) + entry
        return totals

    def only(self, *phases: str) -> Ledger:
        return Ledger({k: e for k, e in self.entries.items() if k.phase in phases})

    def without(self, *phases: str) -> Ledger:
        return Ledger({k: e for k, e in self.entries.items() if k.phase not in phases})

    def differences(self, other: Ledger) -> list[str]:
        """Each key whose entries differ, as a sentence; empty when the ledgers are equal."""
        lines = []
        for key in sorted({*self.entries, *other.entries}):
            mine, theirs = self.entries.get(key, Entry()), other.entries.get(key, Entry())
            if mine != theirs:
                lines.append(
                    f"{key}: {mine.calls} calls, {mine.bytes} bytes versus {theirs.calls} calls, {theirs.bytes} bytes"
                )
        return lines

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "axis": k.axis,
                "phase": k.phase,
                "kind": k.kind,
                "calls": e.calls,
                "messages": e.messages,
                "bytes": e.bytes,
            }
            for k, e in sorted(self.entries.items())
        ]

    @staticmethod
    def from_json(rows: Iterable[Mapping[str, Any]]) -> Ledger:
        return Ledger(
            {
                Key(row["axis"], row["phase"], row["kind"]): Entry(row["calls"], row["messages"], row["bytes"])
                for row in rows
            }
        )


Choose = Callable[[str, str, int, int], Algorithm]
"""The algorithm of a collective, from its axis, kind, payload bytes and ranks; None if there is only one."""


def ledger_of(
    calls: Iterable[tuple[str, str, str, int, int]], choose: Choose = lambda axis, kind, payload_bytes, ranks: None
) -> Ledger:
    """A ledger from (axis, phase, kind, payload bytes, ranks) of single collectives; used for predictions."""
    total: dict[Key, Entry] = {}
    for axis, phase, kind, payload_bytes, ranks in calls:
        algorithm = choose(axis, kind, payload_bytes, ranks)
        cost = sent(kind, payload_bytes=payload_bytes, ranks=ranks, algorithm=algorithm)
        key = Key(axis, phase, kind)
        total[key] = total.get(key, Entry()) + Entry(1, cost.messages, cost.bytes)
    return Ledger(total)


@dataclass(slots=True)
class LastCall:
    """The last collective that a group entered; identifies a late rank."""

    number: int
    kind: str
    phase: str
    since: float


class Book:
    """The running count of one process. One phase is active at a time, also for hooks that run inside backward."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.last: dict[str, LastCall] = {}
        self._entered: dict[tuple[str, str, str], list[int]] = {}
        """(axis, phase, kind) -> calls, messages, bytes."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def enter(
        self, *, axis: str, kind: str, payload_bytes: int, ranks: int, group: str, algorithm: Algorithm = None
    ) -> None:
        cost = sent(kind, payload_bytes=payload_bytes, ranks=ranks, algorithm=algorithm)
        entry = self._entered.get((axis, self.phase, kind))
        if entry is None:
            entry = self._entered[axis, self.phase, kind] = [0, 0, 0]
        entry[0] += 1
        entry[1] += cost.messages
        entry[2] += cost.bytes
        last = self.last.get(group)
        number = last.number + 1 if last else 1
        self.last[group] = LastCall(number, kind, self.phase, time.monotonic())

    def forget(self, group: str) -> None:
        """Forgets the last collective of a closed group."""
        self.last.pop(group, None)

    def take(self) -> Ledger:
        """The entries since the last `take`; resets the count."""
        entered, self._entered = self._entered, {}
        return Ledger({Key(*place): Entry(*entry) for place, entry in entered.items()})


BOOK = Book()
"""This process's book. A process is one rank of one job, so there is one."""
