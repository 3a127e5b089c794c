"""Elastic averaging (EASGD; Zhang, Choromanska and LeCun 2015): every h steps each island and a centre pull at each
other, by the fraction rho of their difference.

With x_i of island i, the centre c, and all on the right as they were before:

    x_i <- x_i - rho (x_i - c)
    c   <- c + rho sum_i (x_i - c)

What islands lose the centre gains: the forces sum to zero. rho is the paper's moving rate, its learning rate times its
elastic coefficient. Islands differ after an exchange; the centre is evaluated and saved, with the mean of the islands'
buffers. EAMSGD is the same with an inner optimiser that has Nesterov momentum, `torch.optim.SGD(..., nesterov=True)`:
that is the job's to say, so the term has no momentum of its own.

"sync": every rank keeps the centre of its slices, and one average of the islands serves both updates. "async": the
first rank holds the centre, and each island exchanges with it by itself, whenever it has made h steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.parallel.sync.scheme import Kept, Scheme
from shoal.strategy.terms.arguments import choice, integer, real
from shoal.strategy.terms.numerals import every, percent
from shoal.strategy.terms.sync import SAME_TARGET, Sendable, pair_calls
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.parallel.sync.outer import OuterLevel
    from shoal.parallel.sync.pairs import PairRule


class elastic(Scheme):
    """Elastic averaging (EASGD): every h steps each replica and a centre pull at each other by a part of
    their difference.

    `rho` is that part, the moving rate of the paper (its learning rate times its elastic coefficient).
    """

    h: int = integer(1, sample=50)
    rho: float = real(0.0, 1.0, sample=0.1)
    mode: str = choice("sync", "async", default="sync")

    title = "elastic averaging (EASGD)"
    equal = False

    def words(self) -> str:
        return (
            f"replicas explore by themselves; {every(self.h, 'step')} each moves {percent(self.rho)} of "
            "the way towards "
            "a common centre, and the centre as much towards it"
        )

    def drift(self, replicas: int) -> Promise | None:
        reason = f"elastic({self.h}, {self.rho}) ties replicas to a centre by a force only, so they explore separately"
        return Promise("statistical", reason, band=SAME_TARGET)

    @property
    def scheduling(self) -> str:  # type: ignore[override]
        return "asynchronous" if self.mode == "async" else "synchronous"

    @property
    def path(self) -> str:  # type: ignore[override]
        return "" if self.mode == "sync" else "with a centre on the first replica, one at a time"

    @property
    def period(self) -> int:
        return self.h

    def sends(self, slices: Sequence[int], buffers: int) -> list[tuple[str, int]]:
        return super().sends(slices, 0)

    def calls(self, clock: int, held: Sendable) -> list[tuple[str, int]]:
        if self.mode == "sync":
            return super().calls(clock, held)
        return pair_calls(held, held.asked if held.island == 0 else int((clock + 1) % self.h == 0))

    def begin(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        names = ("centre",) if self.mode == "sync" else ("centre", "model", "read")
        return {name: [p.clone() for p in parameters] for name in names}

    def numbers(self) -> dict[str, float]:
        return {} if self.mode == "sync" else {"clock": 0.0}

    @property
    def by_tickets(self) -> bool:
        return self.mode == "async"

    def pairs(self, island: int, islands: int) -> PairRule | None:
        if self.mode == "sync":
            return None
        from shoal.parallel.sync.pairs import PairRule

        return PairRule(lambda round: 0, answers_with="centre" if island == 0 else None, part=self.rho)

    def act(self, level: OuterLevel, clock: int, *, stop: bool) -> bool:
        return super().act(level, clock, stop=stop) if level.pairs is None else level.pairs.step(stop=stop)

    def exchange(self, level: OuterLevel, weight: float) -> None:
        own = [tensor.clone() for tensor in level.masters]
        level.average_parameters(1 / level.islands.size)
        for now, mine, centre in zip(level.masters, own, level.kept["centre"], strict=True):
            mean = now.clone()
            now.copy_(mine).sub_(mine - centre, alpha=self.rho)
            centre.add_(mean - centre, alpha=self.rho * level.islands.size)

    def agree(self, level: OuterLevel, weight: float) -> None:
        for now, centre in zip(level.masters, level.kept["centre"], strict=True):
            now.copy_(centre)
        if self.mode == "async":
            level.average_parameters(float(level.islands.index == 0))
        level.average_buffers(weight)

    def simulate(
        self, islands: Sequence[Sequence[torch.Tensor]], weights: Sequence[float], kept: Sequence[Kept]
    ) -> None:
        for at, tensors in enumerate(zip(*islands, strict=True)):
            centre = kept[0]["centre"][at]
            forces = [self.rho * (tensor - centre) for tensor in tensors]
            for tensor, force, each in zip(tensors, forces, kept, strict=True):
                tensor.sub_(force)
                each["centre"][at] = centre + sum(forces)

    def simulate_pair(self, asking: Kept, asked: Kept) -> None:
        for at, (model, centre) in enumerate(zip(asking["model"], asked["centre"], strict=True)):
            force = self.rho * (model - centre)
            asking["model"][at], asked["centre"][at] = model - force, centre + force

    def simulate_agreed(self, islands: Sequence[Sequence[torch.Tensor]], kept: Sequence[Kept]) -> list[torch.Tensor]:
        return kept[0]["centre"]
