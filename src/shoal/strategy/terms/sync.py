"""The ways in which the replicas of one level of data parallelism stay together: what they exchange, and
when.

They run from consistent to inconsistent: every step together, a bounded number of steps apart, whenever a
gradient comes, averaged now and then, or mixed with neighbours only.

Rules by which islands exchange models are a file of `technique/sync` each. Those by which servers update the model
(`Served`) decide here, in plain Python; `parallel/server` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from shoal.common.numbers import packed_bytes
from shoal.strategy.terms.arguments import choice, integer, real
from shoal.strategy.terms.numerals import count, counted
from shoal.strategy.terms.serving import Clocks, Decision, Push
from shoal.strategy.terms.term import REGISTRY, Promise, Term

Exchange = Literal["gradient", "model"]

SAME_TARGET = "reaches the target of the synchronous run, validation loss within 5%"
"""The band of what has no bound of its own: judged by the target, not by the trajectory."""


NUMBERS = 3
"""An exchange of islands begins with as many sums: what each learned from, whether it was asked to stop, and how far it
was from the mean at the last exchange."""
NUMBER_BYTES = 8
QUESTION_NUMBERS = 6
"""What an island that runs at its own speed asks the first one, and what that answers."""
MOVE_NUMBERS = 4
"""Sent with a move, where rounds have a quorum."""


class Sendable(NamedTuple):
    """What one rank holds, as far as exchanges of islands send it."""

    names: Sequence[str]
    """The trainable parameters of the full model, in its order."""
    slices: Sequence[int]
    """Bytes of each of its slices of the parameters."""
    buffers: int
    """Bytes of all floating-point buffers together."""
    exchanged: Callable[[Collection[str], int], list[tuple[str, int]]]
    """The collectives that sum its slices of these parameters over islands, compressed if the level says so, in the
    round of this number: kinds and payload bytes."""
    island: int
    """The number of its island, from 0,"""
    islands: int
    """of how many."""
    asked: int = 1
    """Times that other islands asked it since its last update, where they do so at any time."""
    moments: tuple[int, int] = (1, 1)
    """First and second moments that the inner optimiser keeps; Adam's, where that is not known."""
    moved: Sequence[tuple[str, int]] | None = None
    """What it sent and took since then where rounds have a quorum: ("pushed", "pulled", "received" or "answered", the
    fragment); None where that is not known, as in an estimate."""


def pair_calls(held: Sendable, times: int) -> list[tuple[str, int]]:
    """Exchanges of two islands, on either side: one message each way, with two numbers."""
    size = packed_bytes(held.slices, numbers=2)
    return [(kind, size) for kind in ("recv", "send") for _ in range(times)]


class SyncTerm(Term):
    """How replicas stay together."""

    family = "sync"
    exchanges: ClassVar[Exchange] = "gradient"
    """What crosses between replicas: the gradient, or the model (or how it changed)."""
    scheduling: ClassVar[str] = "synchronous"
    """The place on the scheduling axis of the taxonomy."""
    spectrum: ClassVar[str] = "synchronous"
    """The place on the spectrum from consistent to inconsistent."""
    where = "any links"
    compresses: ClassVar[bool] = True
    """Whether what crosses between replicas can be compressed."""
    neighbours: ClassVar[bool] = False
    """Whether islands send to their neighbours in a graph and to no others, so that an exchange has no collective."""
    path: ClassVar[str] = ""
    """The way that models take, for explanations, where it is not that of `via`."""

    @property
    def period(self) -> int | None:
        """Steps from one exchange of islands to the next, for rules whose replicas are islands that step by themselves;
        None for all others."""
        return None

    @property
    def moments(self) -> Sequence[int]:
        """The steps of a period, counted from 1, after which islands send something."""
        return () if self.period is None else (self.period,)

    def sends(self, slices: Sequence[int], buffers: int) -> list[tuple[str, int]]:
        """The collectives of one exchange of islands on one rank, as kinds and payload bytes, after the numbers
        that every exchange begins with. `slices`: bytes of each of its slices of the parameters; `buffers`: bytes of
        all floating-point buffers together."""
        return [("all_reduce", size) for size in (*slices, buffers) if size]

    def calls(self, clock: int, held: Sendable) -> list[tuple[str, int]]:
        """The collectives between islands after the update of step `clock` (from 0) on one rank. What most rules send
        every `period` steps is `sends`, after the numbers that an exchange begins with."""
        if self.period is None or (clock + 1) % self.period:
            return []
        return [("all_reduce", NUMBERS * NUMBER_BYTES), *self.sends(held.slices, held.buffers)]

    def island_calls(self, clock: int, names: Sequence[str]) -> list[int]:
        """Likewise the all-reduces among the ranks of an island that hold different parts of the model, in bytes.
        `names`: the trainable parameters of the full model."""
        return []

    def missing(self) -> str | None:
        """Which of its arguments parse and explain but cannot be trained yet, as a sentence."""
        return None

    def drift(self, replicas: int) -> Promise | None:
        """How this number of replicas under this rule differ from the serial run; None when they do not."""
        return None


class Served(SyncTerm):
    """A rule by which parameter servers update the model; replicas compute by themselves in between."""

    family = "sync"

    by_tickets: ClassVar[bool] = False
    """Whether a replica that is free takes the next share of the data, in place of its own share of every step."""

    def choose(self, waiting: Sequence[Push], clocks: Clocks, *, flush: bool = False) -> Decision:
        """Which of the gradients that wait, oldest first, are averaged into the next update. `flush`: no more will
        come before all replicas meet."""
        raise TypeError(f"{self} does not define when servers update")

    def may_read(self, worker: int, clocks: Clocks) -> bool:
        """Whether a worker that has pushed may read parameters and go on."""
        return True

    def rate(self, staleness: float) -> float:
        """What an update multiplies the learning rate by, from the mean staleness of its gradients."""
        return 1.0

    @property
    def compensation(self) -> float:
        """Lambda of DC-ASGD: g + lambda g g (w now - w read)."""
        return 0.0


class bsp(Served):
    """Bulk-synchronous: every step uses the gradients of all replicas, or of all but the slowest few."""

    backup: int = integer(0, default=0, kw_only=True)

    title = "bulk-synchronous, with backup workers"

    def words(self) -> str:
        if self.backup:
            return (
                f"every step waits for all replicas but the slowest {count(self.backup)}, whose gradients are dropped"
            )
        return "every step waits for the gradients of all replicas"

    def drift(self, replicas: int) -> Promise | None:
        if not self.backup:
            return None
        slow = counted(self.backup, "replica")
        return Promise("statistical", f"the gradients of the slowest {slow} are dropped each step", band=SAME_TARGET)

    def choose(self, waiting: Sequence[Push], clocks: Clocks, *, flush: bool = False) -> Decision:
        current = [push for push in waiting if push.step == clocks.version]
        enough = len(current) >= min(clocks.workers - self.backup, len(clocks.members))
        return Decision(current if enough else (), [push for push in waiting if push.step < clocks.version])

    def may_read(self, worker: int, clocks: Clocks) -> bool:
        return clocks.clocks[worker] <= clocks.version


class softsync(Served):
    """n-softsync (Rudra): the server steps as soon as n/k gradients have come, from whichever replicas."""

    k: int = integer(1)
    lr: str = choice("plain", "staleness", default="plain", kw_only=True)

    title = "n-softsync"
    by_tickets = True
    scheduling = "bounded asynchronous"
    spectrum = "backup workers / n-softsync"

    def words(self) -> str:
        part = "as many gradients as there are replicas" if self.k == 1 else f"1/{self.k} as many gradients as replicas"
        return (
            f"the server steps when {part} have come, from whichever replicas, and lets none grow older "
            f"than {2 * self.k} steps"
        )

    def drift(self, replicas: int) -> Promise | None:
        if replicas == 1:
            return None
        reason = f"softsync({self.k}) lets a gradient be up to {2 * self.k} updates old"
        return Promise("bounded", reason, staleness=2 * self.k)

    def choose(self, waiting: Sequence[Push], clocks: Clocks, *, flush: bool = False) -> Decision:
        wanted, bound = -(-clocks.workers // self.k), 2 * self.k
        # One update more must leave no gradient older than the bound, neither one that waits nor one under way.
        by_age = sorted(waiting, key=lambda push: push.version)
        chosen = [push for at, push in enumerate(by_age) if at < wanted or clocks.version + 1 - push.version > bound]
        late = clocks.version + 1 - min(clocks.reading.values(), default=clocks.version) > bound
        enough = len(waiting) >= min(wanted, len(clocks.members)) and not late
        return Decision(chosen if enough or flush else ())

    def rate(self, staleness: float) -> float:
        return 1.0 / max(1.0, staleness) if self.lr == "staleness" else 1.0


class ssp(Served):
    """Stale-synchronous: a replica may run ahead of the slowest by at most s steps."""

    s: int = integer(0, sample=3)

    title = "stale-synchronous"
    scheduling = "bounded asynchronous"
    spectrum = "stale-synchronous"

    def words(self) -> str:
        if self.s == 0:
            return "no replica may run ahead of another, so every step waits for all"
        return f"the fastest replica may be at most {counted(self.s, 'step')} ahead of the slowest, then it waits"

    def drift(self, replicas: int) -> Promise | None:
        if replicas == 1 or self.s == 0:
            return None
        reason = f"ssp({self.s}) lets replicas be up to {counted(self.s, 'step')} apart"
        return Promise("bounded", reason, staleness=self.s)

    def choose(self, waiting: Sequence[Push], clocks: Clocks, *, flush: bool = False) -> Decision:
        # One update a step, of all replicas: ssp(0) is bsp() with any optimiser.
        current = [push for push in waiting if push.step == clocks.version]
        return Decision(current if current and clocks.slowest > clocks.version else ())

    def may_read(self, worker: int, clocks: Clocks) -> bool:
        return clocks.clocks[worker] - clocks.slowest <= self.s


class asp(Served):
    """Asynchronous: every gradient is applied when it arrives; no replica waits."""

    lr: str = choice("plain", "staleness", default="plain", kw_only=True)
    compensate: float = real(0.0, 10.0, default=0.0, kw_only=True, inclusive=True)

    title = "asynchronous (Downpour)"
    by_tickets = True
    scheduling = "asynchronous"
    spectrum = "asynchronous / HOGWILD"

    def words(self) -> str:
        text = "every gradient is applied when it arrives, however old its weights are; no replica waits"
        if self.lr == "staleness":
            text += "; the learning rate is divided by the age of the gradient"
        if self.compensate:
            text += f"; its delay is compensated to first order (DC-ASGD, lambda {self.compensate:g})"
        return text

    def drift(self, replicas: int) -> Promise | None:
        if replicas == 1:
            return None
        return Promise("statistical", "asp() puts no bound on the age of a gradient", band=SAME_TARGET)

    def choose(self, waiting: Sequence[Push], clocks: Clocks, *, flush: bool = False) -> Decision:
        return Decision(waiting[:1])

    def rate(self, staleness: float) -> float:
        return 1.0 / max(1.0, staleness) if self.lr == "staleness" else 1.0

    @property
    def compensation(self) -> float:
        return self.compensate


class hogwild(SyncTerm):
    """HOGWILD: all replicas write into one copy of the weights in shared memory, without locks."""

    title = "HOGWILD, lock-free shared memory"
    scheduling = "asynchronous"
    spectrum = "asynchronous / HOGWILD"
    where = "one host"

    def words(self) -> str:
        return "all replicas read and write one copy of the weights in shared memory, without locks"

    def drift(self, replicas: int) -> Promise | None:
        if replicas == 1:
            return None
        reason = "hogwild() lets replicas overwrite each other's updates, and puts no bound on the age of a gradient"
        return Promise("statistical", reason, band=SAME_TARGET)


REGISTRY.find("sync")


def __getattr__(name: str) -> Any:
    """A rule that is a file of its own."""
    if name in REGISTRY.of("sync"):
        return REGISTRY[name]
    raise AttributeError(f"there is no way to synchronise called {name}")
