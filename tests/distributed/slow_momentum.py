"""A scheme that keeps something from exchange to exchange, as a user would declare it: SlowMo (Wang et al. 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.parallel.sync.scheme import Scheme
from shoal.strategy.terms.arguments import integer
from shoal.strategy.terms.numerals import every
from shoal.strategy.terms.sync import SAME_TARGET
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.parallel.sync.outer import OuterLevel

MOMENTUM = 0.5


class slowmo(Scheme):
    """SlowMo: the average's change is taken with momentum."""

    h: int = integer(1, sample=50)

    title = "SlowMo, slow momentum"

    def words(self) -> str:
        return f"replicas step by themselves; {every(self.h, 'step')} their mean change is taken with slow momentum"

    def drift(self, replicas: int) -> Promise | None:
        return Promise("statistical", f"slowmo({self.h}) has a momentum of its own", band=SAME_TARGET)

    @property
    def period(self) -> int:
        return self.h

    def begin(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        return {"anchor": [p.clone() for p in parameters], "momentum": [p.clone().zero_() for p in parameters]}

    def exchange(self, level: OuterLevel, weight: float) -> None:
        level.average(weight)
        for now, anchor, momentum in zip(level.masters, level.kept["anchor"], level.kept["momentum"], strict=True):
            momentum.mul_(MOMENTUM).add_(anchor).sub_(now)
            anchor.sub_(momentum)
            now.copy_(anchor)

    def simulate(
        self,
        islands: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[float],
        kept: Sequence[dict[str, list[torch.Tensor]]],
    ) -> None:
        for at, tensors in enumerate(zip(*islands, strict=True)):
            mean = sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True))
            for tensor, each in zip(tensors, kept, strict=True):
                each["momentum"][at] = MOMENTUM * each["momentum"][at] + each["anchor"][at] - mean
                each["anchor"][at] = each["anchor"][at] - each["momentum"][at]
                tensor.copy_(each["anchor"][at])
