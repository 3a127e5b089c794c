"""BMUF (Chen and Huo 2016): islands step by themselves through a block of h steps; the change of their mean over the
block is filtered with block momentum.

With W the filtered model, D its last change, and m the mean of the islands, weighted by what each learned from:

    D <- momentum D + lr (m - start)        start: the parameters that the block began with
    W <- W + D
    the next block begins with W (classical), or with W + momentum D (nesterov=True)

Momentum 0 and lr 1 is local SGD. SlowMo (Wang et al. 2020) with a slow rate of 1 is the classical form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.parallel.sync.scheme import Scheme
from shoal.strategy.terms.arguments import flag, integer, real
from shoal.strategy.terms.numerals import counted
from shoal.strategy.terms.sync import SAME_TARGET
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.parallel.sync.outer import OuterLevel


class bmuf(Scheme):
    """Blockwise model-update filtering: every h steps the averaged change is smoothed by block momentum."""

    h: int = integer(1, sample=50)
    momentum: float = real(0.0, 1.0, default=0.5, kw_only=True, inclusive=True)
    lr: float = real(0.0, 10.0, default=1.0, kw_only=True)
    nesterov: bool = flag(default=False, kw_only=True)

    title = "BMUF, block momentum"

    def words(self) -> str:
        return (
            f"replicas step by themselves through a block of {counted(self.h, 'step')}; the averaged "
            "change of the block is filtered with a momentum of its own"
        )

    def drift(self, replicas: int) -> Promise | None:
        reason = f"{self} filters the change of every block with momentum, which the serial run does not have"
        return Promise("statistical", reason, band=SAME_TARGET)

    @property
    def period(self) -> int:
        return self.h

    def begin(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        return {
            "filtered": [p.clone() for p in parameters], "change": [p.clone().zero_() for p in parameters],
            "start": [p.clone() for p in parameters],
        }  # fmt: skip

    def exchange(self, level: OuterLevel, weight: float) -> None:
        level.average(weight)
        kept = level.kept
        rows = zip(level.masters, kept["filtered"], kept["change"], kept["start"], strict=True)
        for mean, filtered, change, start in rows:
            change.mul_(self.momentum).add_(mean - start, alpha=self.lr)
            filtered.add_(change)
            start.copy_(filtered)
            if self.nesterov:
                start.add_(change, alpha=self.momentum)
            mean.copy_(start)

    def simulate(
        self, islands: Sequence[Sequence[torch.Tensor]], weights: Sequence[float],
        kept: Sequence[dict[str, list[torch.Tensor]]],
    ) -> None:  # fmt: skip
        for at, tensors in enumerate(zip(*islands, strict=True)):
            mean = sum(weight * tensor for weight, tensor in zip(weights, tensors, strict=True))
            first = kept[0]
            change = self.momentum * first["change"][at] + self.lr * (mean - first["start"][at])
            filtered = first["filtered"][at] + change
            start = filtered + self.momentum * change if self.nesterov else filtered
            for tensor, each in zip(tensors, kept, strict=True):
                each["filtered"][at], each["change"][at], each["start"][at] = filtered, change, start
                tensor.copy_(start)
