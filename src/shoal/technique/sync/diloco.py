"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105): islands step by themselves; every h steps an outer optimiser takes
the mean of how far they moved for a gradient.

With the parameters theta at the last exchange and theta_k of island k now, D is the mean of theta - theta_k, weighted
by what each island learned from:

    b <- momentum b + D
    "nesterov"     theta <- theta - lr (D + momentum b)          as torch.optim.SGD(nesterov=True)
    "heavy-ball"   theta <- theta - lr b                         as torch.optim.SGD

The state of the inner optimiser stays with its island. lr=1 and momentum=0 is local SGD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.parallel.sync.scheme import Scheme
from shoal.strategy.terms.arguments import choice, integer, real
from shoal.strategy.terms.numerals import every
from shoal.strategy.terms.sync import SAME_TARGET
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.parallel.sync.outer import OuterLevel


class diloco(Scheme):
    """DiLoCo: every h steps the mean change of the replicas is taken as a gradient by an outer optimiser with
    momentum.
    """

    h: int = integer(1, sample=50)
    lr: float = real(0.0, 10.0, default=0.7, kw_only=True)
    momentum: float = real(0.0, 1.0, default=0.9, kw_only=True, inclusive=True)
    form: str = choice("nesterov", "heavy-ball", default="nesterov", kw_only=True)

    title = "DiLoCo, outer Nesterov momentum"

    def words(self) -> str:
        kind = "Nesterov" if self.form == "nesterov" else "heavy-ball"
        return (
            f"replicas step by themselves; {every(self.h, 'step')} the mean of how far they moved "
            f"is taken as a gradient by an outer optimiser with {kind} momentum"
        )

    def drift(self, replicas: int) -> Promise | None:
        reason = f"{self} steps an outer optimiser {every(self.h, 'step')}, which the serial run does not have"
        return Promise("statistical", reason, band=SAME_TARGET)

    @property
    def period(self) -> int:
        return self.h

    def begin(self, parameters: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        return {"anchor": [p.clone() for p in parameters], "momentum": [p.clone().zero_() for p in parameters]}

    def exchange(self, level: OuterLevel, weight: float) -> None:
        level.average(weight)
        for mean, anchor, momentum in zip(level.masters, level.kept["anchor"], level.kept["momentum"], strict=True):
            moved = anchor - mean
            momentum.mul_(self.momentum).add_(moved)
            step = moved.add_(momentum, alpha=self.momentum) if self.form == "nesterov" else momentum
            anchor.sub_(step, alpha=self.lr)
            mean.copy_(anchor)

    def simulate(
        self, islands: Sequence[Sequence[torch.Tensor]], weights: Sequence[float],
        kept: Sequence[dict[str, list[torch.Tensor]]],
    ) -> None:  # fmt: skip
        import torch

        for at, tensors in enumerate(zip(*islands, strict=True)):
            theta, buffer = kept[0]["anchor"][at], kept[0]["momentum"][at]
            outer = torch.nn.Parameter(theta.clone())
            optimizer = torch.optim.SGD([outer], lr=self.lr, momentum=self.momentum,
                                        nesterov=self.form == "nesterov" and self.momentum > 0)  # fmt: skip
            optimizer.state[outer]["momentum_buffer"] = buffer.clone()
            outer.grad = sum(weight * (theta - tensor) for weight, tensor in zip(weights, tensors, strict=True))
            optimizer.step()
            after = optimizer.state[outer]["momentum_buffer"]
            for tensor, each in zip(tensors, kept, strict=True):
                each["anchor"][at], each["momentum"][at] = outer.detach().clone(), after.clone()
                tensor.copy_(outer.detach())
