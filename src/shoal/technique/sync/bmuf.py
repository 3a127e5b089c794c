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

from shoal.parallel.sync.averaged import Averaged, RoundPlan, Tensors
from shoal.strategy.terms.arguments import choice, flag, integer, real
from shoal.strategy.terms.numerals import counted
from shoal.strategy.terms.sync import SAME_TARGET
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    import torch


class bmuf(Averaged):
    """Blockwise model-update filtering: every h steps the averaged change is smoothed by block momentum."""

    h: int = integer(1, sample=50)
    momentum: float = real(0.0, 1.0, default=0.25, kw_only=True, inclusive=True)
    lr: float = real(0.0, 10.0, default=1.0, kw_only=True)
    nesterov: bool = flag(default=False, kw_only=True)
    state: str = choice("local", "reset", default="local", kw_only=True)

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
    def plan(self) -> RoundPlan:
        return RoundPlan(self.h, state=self.state)

    @property
    def outer_state(self) -> tuple[str, ...]:
        return ("change", "ahead")

    def outer_step(self, moved: torch.Tensor, kept: Tensors) -> None:
        start, change, ahead = kept["anchor"], kept["change"], kept["ahead"]
        start.sub_(ahead)  # The filtered model, which the block began `ahead` of.
        change.mul_(self.momentum).sub_(moved, alpha=self.lr)
        start.add_(change)
        if self.nesterov:
            ahead.copy_(change).mul_(self.momentum)
            start.add_(ahead)

    def simulate_outer(self, moved: torch.Tensor, kept: Tensors) -> Tensors:
        filtered = kept["anchor"] - kept["ahead"]
        change = self.momentum * kept["change"] - self.lr * moved
        ahead = self.momentum * change if self.nesterov else 0 * change
        return {"anchor": filtered + change + ahead, "change": change, "ahead": ahead}
