"""Schemes whose islands send how far they moved since the last round, and step an outer optimiser with the mean of it.

With the anchor A, the values that a round began from, and an island's theta_k now, its move is D_k = A - theta_k. A
round sends the moves, and brings their mean D; the outer step makes A the next anchor, from which the island goes on:

    sent after step t, applied after step t + overlap:    theta_k <- blend theta_k + (1 - blend) A
    eager: the round of t is applied at t + h with this island's part of it fresh, D + w_k (D_k(t + h) - D_k(t))

Fragments of the model have rounds of their own (`fragments.py`). A scheme is the rule of its outer step, `outer_step`,
and the same once more in plain PyTorch, `simulate_outer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.common.numbers import packed_bytes
from shoal.parallel.sync.fragments import fragments_of, sent_after
from shoal.parallel.sync.scheme import Scheme
from shoal.strategy.terms.numerals import every
from shoal.strategy.terms.sync import MOVE_NUMBERS, NUMBER_BYTES, NUMBERS, QUESTION_NUMBERS, Sendable

if TYPE_CHECKING:
    import torch

    from shoal.parallel.sync.outer import OuterLevel

Tensors = dict[str, "torch.Tensor"]


class RoundPlan(NamedTuple):
    """When rounds are sent and applied, and how moves are merged."""

    h: int
    """Steps from one round of a fragment to its next."""
    fragments: int = 1
    overlap: int = 0
    """Steps from sending to applying."""
    blend: float = 0.0
    """The part of its own values that an island keeps when a round is applied."""
    eager: bool = False
    merge: str = "mean"
    weight: str = "samples"
    start: int = 0
    """Steps at the start of training in which all islands step together: their gradients are summed."""
    state: str = "local"
    """What a round does to the state of the inner optimiser: nothing ("local"), "reset" or "averaged"."""
    m: int = 0
    """Steps from one average of its first moments to the next; 0: they come with every round."""
    v: int = 0
    """Likewise of its second moments."""
    quorum: int = 0
    """Moves that make a round, where islands do not wait for all of them; 0: they do."""
    grace: float = 1.0
    """How long a round waits for the others once its quorum is there and someone waits for it, in steps."""

    @property
    def late(self) -> int:
        """Steps that a round is on its way."""
        return self.h if self.eager else self.overlap

    @property
    def plain(self) -> bool:
        """Whether all islands hold the same model after a round."""
        return self.fragments == 1 and not self.late and not self.blend and not self.quorum

    def sent(self, step: int) -> list[int]:
        """The fragments that are sent after a step, counted from 1."""
        if step <= self.start:
            return []
        return [p for p in range(self.fragments) if (step - sent_after(p, self.fragments, self.h)) % self.h == 0]

    def applied(self, step: int) -> list[int]:
        """The fragments whose round arrives after a step; an eager one when the next is sent."""
        return [] if self.eager else self.sent(step - self.overlap)

    def moments(self, step: int) -> list[str]:
        """Which moments of the inner optimiser are averaged after a step, counted from 1."""
        if self.state != "averaged" or not self.sent(step):
            return []
        return [kind for kind, period in (("m", self.m), ("v", self.v)) if step % (period or self.h) == 0]

    def counts(self, learned: float, steps: float) -> float:
        """What an island's move counts for."""
        if self.weight == "equal":
            return 1.0
        return learned if self.weight == "samples" else learned * learned / steps


def averaged_words(state: str, h: int, m: int, v: int) -> str:
    """What happens to the inner optimiser's moments, for explanations."""
    if state != "averaged":
        return ""
    if (m or h) == (v or h) == h:
        return ", and the inner optimiser's moments with them"
    return f", its first moments {every(m or h, 'step')} and its second ones {every(v or h, 'step')}"


class Averaged(Scheme):
    """Islands with rounds. `plan` says which."""

    family = "sync"
    compresses = True

    @property
    def plan(self) -> RoundPlan:
        raise TypeError(f"{self} does not define its rounds")

    def outer_step(self, moved: torch.Tensor, kept: Tensors) -> None:
        """Changes `kept["anchor"]`, and what else it keeps, in place, by the mean of the moves; `moved` may be
        overwritten."""
        raise TypeError(f"{self} does not define its outer step")

    def simulate_outer(self, moved: torch.Tensor, kept: Tensors) -> Tensors:
        """The same in plain PyTorch: what it keeps afterwards."""
        raise TypeError(f"{self} does not define its outer step in one process")

    @property
    def outer_state(self) -> tuple[str, ...]:
        """What it keeps besides the anchor, zero at the start."""
        return ()

    # What every Scheme has:

    @property
    def period(self) -> int:
        return self.plan.h

    @property
    def equal(self) -> bool:  # type: ignore[override]
        return self.plan.plain

    @property
    def moments(self) -> Sequence[int]:
        plan = self.plan
        return [sent_after(p, plan.fragments, plan.h) for p in range(plan.fragments)]

    def begin(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        found = {"anchor": [p.clone() for p in parameters]}
        if self.plan.quorum:
            names = ("centre", *self.outer_state)
            zero = [[p.clone().zero_() for p in parameters] for _ in self.outer_state]
            return found | dict(zip(names, [[p.clone() for p in parameters], *zero], strict=True))
        flying = ("sent", "arriving") if self.plan.late else ()
        return found | {name: [p.clone().zero_() for p in parameters] for name in (*self.outer_state, *flying)}

    def numbers(self) -> dict[str, float]:
        plan = self.plan
        if plan.plain:
            return {}
        if plan.quorum:
            names: tuple[str, ...] = ("count", "steps", "version", "centre version")
            return {f"{name} {p}": 0.0 for name in names for p in range(plan.fragments)}
        names = ("count", "steps", *(("flying", "weight", "sent count", "stop") if plan.late else ()))
        return {f"{name} {p}": 0.0 for name in names for p in range(plan.fragments)}

    def calls(self, clock: int, held: Sendable) -> list[tuple[str, int]]:
        plan = self.plan
        if plan.quorum:
            return self._quorum_calls(clock, held)
        found: list[tuple[str, int]] = []
        if clock < plan.start:
            sizes = ((5 + len(held.names)) * NUMBER_BYTES, *held.slices, held.buffers)
            return [("all_reduce", size) for size in sizes if size]
        for p in plan.sent(clock + 1) if clock + 1 > 0 else ():
            names = fragments_of(held.names, plan.fragments)[p]
            numbers = NUMBERS + (len(names) if plan.merge == "radial" else 0)
            found += [("all_reduce", numbers * NUMBER_BYTES), *held.exchanged(names, clock // plan.h)]
            if plan.plain and held.buffers:
                found.append(("all_reduce", held.buffers))
        averaged = plan.moments(clock + 1) if clock + 1 > 0 else []
        times = sum(held.moments["mv".index(kind)] for kind in averaged)
        if times:
            found += [("all_reduce", max(4, size)) for size in held.slices for _ in range(times)]
            found.append(("all_reduce", NUMBER_BYTES))
        return found

    def _quorum_calls(self, clock: int, held: Sendable) -> list[tuple[str, int]]:
        """A question, then a move or an anchor as one message; on the first island from and to each of the others."""
        moved, found = held.moved, list[tuple[str, int]]()
        if moved is None:
            kinds = ("received", "answered") if held.island == 0 else ("pushed", "pulled")
            times = held.islands - 1 if held.island == 0 else 1
            moved = [(kind, p) for p in self.plan.sent(clock + 1) for kind in kinds for _ in range(times)]
        for what, p in moved:
            names = fragments_of(held.names, self.plan.fragments)[p]
            sizes = [size for _, size in held.exchanged(names, 0)]
            data = packed_bytes(sizes, numbers=MOVE_NUMBERS)
            asking = "recv" if what in ("received", "answered") else "send"
            found.append((asking, QUESTION_NUMBERS * NUMBER_BYTES))
            found.append(("recv" if what in ("received", "pulled") else "send", data))
        return found

    def island_calls(self, clock: int, names: Sequence[str]) -> list[int]:
        plan = self.plan
        if plan.merge != "radial":
            return []
        parts, step = fragments_of(names, plan.fragments), clock + 1
        arriving = plan.sent(step) if plan.eager and step > plan.h else []
        arriving += plan.applied(step) if step > plan.overlap else []
        return [len(parts[p]) * NUMBER_BYTES for p in (*plan.sent(step), *arriving)]

    @property
    def by_tickets(self) -> bool:
        return self.plan.quorum > 0

    @property
    def merges(self) -> bool:
        return self.plan.quorum > 0

    def start_turns(self, level: OuterLevel, step: int) -> None:
        if self.plan.quorum:
            from shoal.parallel.sync.quorum import begin

            begin(self, level, step)

    def turn(self, level: OuterLevel, before: int, after: int) -> None:
        if self.plan.quorum:
            from shoal.parallel.sync.quorum import turn

            turn(self, level, before, after)

    def synchronous(self, clock: int) -> bool:
        return clock < self.plan.start

    def act(self, level: OuterLevel, clock: int, *, stop: bool) -> bool:
        from shoal.parallel.sync.streams import after_update

        if self.plan.quorum:
            return False  # Islands exchange with the first one between their tickets.
        return after_update(self, level, clock + 1, stop=stop)

    def simulate_step(self, clock: int, islands: Sequence[Any]) -> bool:
        from shoal.parallel.sync.simulated import simulate_rounds

        simulate_rounds(self, clock + 1, islands)
        return True
