"""Local SGD: islands step by themselves and average their parameters every h steps (`sync=local(h)`).

An island's weight in the mean is the part of the samples (or tokens) that it learned from since the last exchange, as
in FedAvg: with uneven shares, h = 1 and plain SGD the mean is then the synchronous step. With start=k the first k steps
are synchronous (post-local SGD, Lin et al. 2020). Optimiser state stays local, begins anew after each average
(state="reset"), or is averaged (state="averaged"): its first moments every m steps, its second ones every v, where
these are not those of the parameters (DES-LOC, arXiv 2505.22549).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.parallel.sync.averaged import Averaged, RoundPlan, Tensors, averaged_words
from shoal.strategy.terms.arguments import choice, integer
from shoal.strategy.terms.numerals import every
from shoal.strategy.terms.sync import SAME_TARGET
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    import torch


class local(Averaged):
    """Local SGD: replicas step by themselves and average their weights every h steps."""

    h: int = integer(1, sample=50)
    start: int = integer(0, 1_000_000, default=0, kw_only=True)
    state: str = choice("local", "reset", "averaged", default="local", kw_only=True)
    m: int = integer(0, default=0, kw_only=True)
    v: int = integer(0, default=0, kw_only=True)

    title = "local SGD, periodic averaging"

    def words(self) -> str:
        said = f"replicas step by themselves and average their weights {every(self.h, 'step')}"
        said += averaged_words(self.state, self.h, self.m, self.v)
        return f"{said}, from step {self.start + 1} on; before, they sum gradients" if self.start else said

    def drift(self, replicas: int) -> Promise | None:
        if replicas == 1:
            return None
        if self.h == 1:
            reason = (
                "local(1) averages weights, not gradients: the serial run only with plain SGD, not with "
                "momentum or Adam"
            )
        else:
            reason = f"local({self.h}) lets replicas diverge for {self.h:,} steps before they are averaged"
        return Promise("statistical", reason, band=SAME_TARGET)

    @property
    def plan(self) -> RoundPlan:
        return RoundPlan(self.h, start=self.start, state=self.state, m=self.m, v=self.v)

    def outer_step(self, moved: torch.Tensor, kept: Tensors) -> None:
        kept["anchor"].sub_(moved)

    def simulate_outer(self, moved: torch.Tensor, kept: Tensors) -> Tensors:
        return {"anchor": kept["anchor"] - moved}
