"""DiLoCo (Douillard et al. 2023, arXiv 2311.08105): islands step by themselves; every h steps an outer optimiser takes
the mean of how far they moved for a gradient.

With the parameters theta at the last exchange and theta_k of island k now, D is the mean of theta - theta_k, weighted
by what each island learned from:

    b <- momentum b + D
    "nesterov"     theta <- theta - lr (D + momentum b)          as torch.optim.SGD(nesterov=True)
    "heavy-ball"   theta <- theta - lr b                         as torch.optim.SGD

The paper takes lr 0.7 and momentum 0.9 for runs of 10,000s of steps; the default momentum is the best of a sweep on
short runs (docs/consistency.md). lr=1 and momentum=0 is local SGD. Arguments make of it what came after:

    fragments=P, overlap=tau, blend=alpha    Streaming DiLoCo (arXiv 2501.18512): layers in turn go to P fragments, each
                                             is sent every h steps, and applied tau steps after it was sent, while steps
                                             go on: theta_k <- alpha theta_k + (1 - alpha) theta
    eager=True                               (arXiv 2502.12996) one round late, the island's own part of it fresh
    merge="radial", weight="tokens2/steps"   Decoupled DiLoCo (arXiv 2604.21428): for each tensor the weighted mean of
                                             norms times the unit vector of the weighted mean of unit vectors
    quorum=k, grace=g                        the rest of Decoupled DiLoCo: replicas run at their own speed, and a round
                                             is merged when k moves are there and g steps' time is over (`quorum.py`)
    momentum=0.0, with compress=             SparseLoCo (arXiv 2508.15706): the largest of D are sent, the rest is kept

The state of the inner optimiser stays with its island, unless state="averaged" (as in `local.py`). With a Muon job
inside it is MuLoCo (arXiv 2505.23725).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.parallel.sync.averaged import Averaged, RoundPlan, Tensors, averaged_words
from shoal.strategy.terms.arguments import choice, flag, integer, real
from shoal.strategy.terms.numerals import counted, every
from shoal.strategy.terms.sync import SAME_TARGET
from shoal.strategy.terms.term import Promise

if TYPE_CHECKING:
    import torch


class diloco(Averaged):
    """DiLoCo: every h steps the mean change of the replicas is taken as a gradient by an outer optimiser with
    momentum.
    """

    h: int = integer(1, sample=50)
    lr: float = real(0.0, 10.0, default=0.7, kw_only=True)
    momentum: float = real(0.0, 1.0, default=0.5, kw_only=True, inclusive=True)
    form: str = choice("nesterov", "heavy-ball", default="nesterov", kw_only=True)
    fragments: int = integer(1, default=1, kw_only=True)
    overlap: int = integer(0, 1_000_000, default=0, kw_only=True)
    blend: float = real(0.0, 1.0, default=0.0, kw_only=True, inclusive=True)
    eager: bool = flag(default=False, kw_only=True)
    state: str = choice("local", "reset", "averaged", default="local", kw_only=True)
    m: int = integer(0, default=0, kw_only=True)
    v: int = integer(0, default=0, kw_only=True)
    merge: str = choice("mean", "radial", default="mean", kw_only=True)
    weight: str = choice("samples", "equal", "tokens2/steps", default="samples", kw_only=True)
    quorum: int = integer(0, default=0, kw_only=True)
    grace: float = real(0.0, 1000.0, default=1.0, kw_only=True, inclusive=True)

    title = "DiLoCo, outer Nesterov momentum"

    def words(self) -> str:
        kind = "Nesterov" if self.form == "nesterov" else "heavy-ball"
        said = (
            f"replicas step by themselves; {every(self.h, 'step')} the mean of how far they moved "
            f"is taken as a gradient by an outer optimiser with {kind} momentum"
        )
        if self.fragments > 1:
            said += f"; {self.fragments} fragments of the layers take their turns"
        if self.overlap:
            said += f"; what is sent is applied {counted(self.overlap, 'step')} later, while steps go on"
        if self.eager:
            said += "; others' moves are one round late, so that no replica waits"
        if self.quorum:
            said += (
                f"; replicas run at their own speed, and a round is merged once {counted(self.quorum, 'move')} are "
                f"there and {self.grace:g} times the time of a step has passed"
            )
        said += averaged_words(self.state, self.h, self.m, self.v)
        if self.merge == "radial":
            said += "; norms and directions of the moves are averaged separately"
        return said

    def drift(self, replicas: int) -> Promise | None:
        reason = f"{self} steps an outer optimiser {every(self.h, 'step')}, which the serial run does not have"
        return Promise("statistical", reason, band=SAME_TARGET)

    @property
    def plan(self) -> RoundPlan:
        return RoundPlan(
            self.h,
            self.fragments,
            self.overlap,
            self.blend,
            self.eager,
            self.merge,
            self.weight,
            state=self.state,
            m=self.m,
            v=self.v,
            quorum=self.quorum,
            grace=self.grace,
        )

    @property
    def scheduling(self) -> str:  # type: ignore[override]
        return "bounded asynchronous" if self.quorum else "synchronous"

    @property
    def path(self) -> str:  # type: ignore[override]
        return "with the first replica, which merges" if self.quorum else ""

    @property
    def outer_state(self) -> tuple[str, ...]:
        return ("momentum",)

    def outer_step(self, moved: torch.Tensor, kept: Tensors) -> None:
        anchor, momentum = kept["anchor"], kept["momentum"]
        momentum.mul_(self.momentum).add_(moved)
        step = moved.add_(momentum, alpha=self.momentum) if self.form == "nesterov" else momentum
        anchor.sub_(step, alpha=self.lr)

    def simulate_outer(self, moved: torch.Tensor, kept: Tensors) -> Tensors:
        import torch

        outer = torch.nn.Parameter(kept["anchor"].clone())
        optimizer = torch.optim.SGD(
            [outer], lr=self.lr, momentum=self.momentum, nesterov=self.form == "nesterov" and self.momentum > 0
        )
        optimizer.state[outer]["momentum_buffer"] = kept["momentum"].clone()
        outer.grad = moved.clone()
        optimizer.step()
        return {"anchor": outer.detach().clone(), "momentum": optimizer.state[outer]["momentum_buffer"].clone()}
