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

T = TypeVar("T")


def lost_ranks() -> list[int]:
    """The ranks that were killed so far, as the process that started this one has noted."""
    folder = os.environ.get(LOST_FOLDER)
    return [int(path.name) for path in Path(folder).iterdir()] if folder else []


class LostIslands:
    """The losses of one run, as one rank sees them."""

    def __init__(self, ready: Prepared, channel: Any, *, rank: int) -> None:
        self.found: list[dict[str, Any]] = []
        """For each loss: ranks, the step at whose exchange the others went on without them, and why."""
        self._outer, self._engine, self._strategy = ready.engine.outer, ready.engine, ready.strategy
        self._channel, self._rank = channel, rank
        self.in_step = False
        """Whether the step after the engine's clock is under way."""

    @property
    def ranks(self) -> list[int]:
        return [rank for loss in self.found for rank in loss["ranks"]]

    def report(self) -> dict[str, Any]:
        """For the run's record."""
        return {"lost": self.found} if self.found else {}

    def allow(self) -> None:
        """From here on an island may be lost, where `run_ranks` supervises the ranks and groups can be made again. No
        island begins before all have come so far: one that is killed early would end the run. Collective."""
        outer, folder, place = self._outer, os.environ.get(LOST_FOLDER), current()
        if outer is not None and folder and place is not None and isinstance(outer.islands.group, ShoalGroup):
            outer.losses = Losses(Path(folder), place.store, self._rank, islands(self._strategy))
            outer.on_loss = self._go_on_without
            if isinstance(tickets := self._engine.owner.tickets, SharedTickets):
                tickets.lost = lost_ranks
            self._channel.allow_loss()
            exchange({})

    def together(self, act: Callable[[], T]) -> T:
        """Does what all islands take part in, and can be done again."""
        return act() if self._outer is None else self._outer.together(act)

    def _go_on_without(self, ranks: list[int], reason: str) -> None:
        step = self._engine.clock + self.in_step
        self.found.append({"ranks": ranks, "step": step, "reason": reason})
        if self._rank == 0:
            names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            text = f"the island of {names} was lost ({reason}); at step {step} the others go on without it"
            self._channel.say({"event": "lost", "ranks": ranks, "step": step, "text": text})
