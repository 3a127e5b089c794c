"""Deep gradient compression (Lin et al. 2018): top-k of an accumulated momentum, with a gentle start.

Momentum is applied here, on each rank, before elements are chosen (`feedback.MomentumCorrection`). The job's optimiser
should therefore be plain SGD, without momentum of its own. In its first steps it sends more: a quarter of the elements,
a sixteenth and so on, down to its fraction (`traffic.warm_up_fraction`).

Masking momentum where elements were sent is not linear in the gradient. Where ranks see alike data that is harmless;
where their gradients differ in the mean (each rank its own kind of data), they do not quite cancel at the optimum.
"""

from __future__ import annotations

from shoal.comm.compress.compressed import Compressed
from shoal.comm.compress.feedback import MomentumCorrection
from shoal.comm.compress.topk import TopK
from shoal.comm.compress.traffic import warm_up_fraction
from shoal.strategy.terms.compress import dgc


class WarmedUp(TopK):
    """Top-k whose k falls in the first steps."""

    def fraction_at(self, step: int) -> float:
        return warm_up_fraction(self.fraction, step)


class Dgc(Compressed):
    """`clip`: the bound on the norm of the whole gradient, if the job has one; clipping is then local."""

    def __init__(self, term: dgc, *, clip: float | None) -> None:
        super().__init__(term, codec=WarmedUp(fraction=term.r), feedback=MomentumCorrection(clip=clip))
