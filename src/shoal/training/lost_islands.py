"""A run that goes on without islands that were killed: which ranks, and at which step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shoal.comm.backend import ShoalGroup
from shoal.comm.json_exchange import exchange
from shoal.comm.losses import Losses
from shoal.launch.join import current
from shoal.launch.supervise import LOST_FOLDER
from shoal.parallel.shared_tickets import SharedTickets
from shoal.runtime.setup import Prepared
from shoal.strategy.islands import islands
from shoal.training.joining import Past

T = TypeVar("T")


def lost_ranks() -> list[int]:
    """The ranks that were killed so far, as the process that started this one has noted."""
    folder = os.environ.get(LOST_FOLDER)
    return [int(path.name) for path in Path(folder).iterdir()] if folder else []


class LostIslands:
    """The losses of one run, as one rank sees them."""

    def __init__(self, ready: Prepared, channel: Any, *, rank: int, past: Past | None = None) -> None:
        """`past`: what was lost before ranks came back."""
        self.found: list[dict[str, Any]] = []
        """For each loss: ranks, the step at whose exchange the others went on without them, and why."""
        self._past = past or Past()
        self._costs: list[dict[str, Any]] = []
        self._met = ready.engine.clock
        """The step at which all islands did something together last."""
        self._outer, self._engine, self._strategy = ready.engine.outer, ready.engine, ready.strategy
        self._channel, self._rank, self._job = channel, rank, ready.job
        self.in_step = False
        """Whether the step after the engine's clock is under way."""

    @property
    def ranks(self) -> list[int]:
        return [rank for loss in self.found for rank in loss["ranks"]]

    def report(self) -> dict[str, Any]:
        """For the run's record."""
        past = self._past
        times = [] if self._outer is None or self._outer.losses is None else self._outer.losses.times
        past.recovery += [{**cost, **seconds} for cost, seconds in zip(self._costs, times, strict=False)]
        past.lost += self.found
        found = {"lost": past.lost, "recovery": sorted(past.recovery, key=lambda row: row["step"])}
        return {name: rows for name, rows in found.items() if rows}

    def allow(self) -> None:
        """From here on an island may be lost, where `run_ranks` supervises the ranks and groups can be made again. No
        island begins before all have come so far: one that is killed early would end the run. Collective."""
        outer, folder, place = self._outer, os.environ.get(LOST_FOLDER), current()
        if outer is not None and folder and place is not None and isinstance(outer.islands.group, ShoalGroup):
            outer.losses = Losses(Path(folder), place.store, self._rank, islands(self._strategy))
            outer.losses.done = self._note_meeting
            outer.on_loss = self._go_on_without
            if isinstance(tickets := self._engine.owner.tickets, SharedTickets):
                tickets.lost = lost_ranks
            self._channel.allow_loss()
            exchange({})

    def together(self, act: Callable[[], T]) -> T:
        """Does what all islands take part in, and can be done again."""
        return act() if self._outer is None else self._outer.together(act)

    def _note_meeting(self) -> None:
        self._met = self._engine.clock + self.in_step

    def _left_out(self, ranks: list[int], step: int) -> dict[str, Any]:
        """The steps that lost ranks made, or should have made, since all met last, and the samples of their shares of
        these: none learns from them. Where data is handed out by tickets, others take them over."""
        assert self._outer is not None
        if self._outer.tickets is not None or getattr(self._engine.owner.tickets, "by_tickets", False):
            return {"lost_steps": 0, "lost_samples": 0}
        steps, batch = step - self._met, self._job.global_batch
        lost = sum(bool(set(island) & set(ranks)) for island in islands(self._strategy))
        share = lost / (self._outer.islands.size + lost)
        return {"lost_steps": steps, "lost_samples": round(steps * batch * share)}

    def _go_on_without(self, ranks: list[int], reason: str) -> None:
        step = self._engine.clock + self.in_step
        self.found.append({"ranks": ranks, "step": step, "reason": reason})
        self._costs.append({"lost": ranks, "step": step, **self._left_out(ranks, step)})
        if self._rank == 0:
            names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            text = f"the island of {names} was lost ({reason}); at step {step} the others go on without it"
            self._channel.say({"event": "lost", "ranks": ranks, "step": step, "text": text})
