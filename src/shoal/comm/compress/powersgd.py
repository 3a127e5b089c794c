"""PowerSGD (Vogels et al. 2019): a gradient matrix as a product of two thin ones, by one step of power iteration.

With a query Q, P = M Q is summed over ranks and made orthonormal, then Q = M^T P is summed: both all-reduces of thin
matrices, and P Q^T is the projection of the summed gradient on the columns of P. The sum of Q is the next step's query
(a warm start), the same on all ranks. Each rank keeps M - P (M^T P)^T, its own part of what the projection leaves out.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.exchange import Sum
from shoal.comm.compress.feedback import Residual
from shoal.comm.compress.given import Draw, Over, State
from shoal.comm.compress.method import Method, Total, is_finite, or_nan
from shoal.comm.compress.traffic import effective_rank, matrix_of
from shoal.strategy.terms.compress import powersgd


class PowerSgd(Method):
    """Rank-r approximations of gradient matrices (the first dimension by all others) with error feedback."""

    term: powersgd
    feedback = Residual()

    def _total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        matrix = value.view(matrix_of(shape))
        query = _query(matrix, effective_rank(self.term.rank, shape), kept, draw)
        left = (yield Sum(matrix @ query)).view(len(matrix), -1)
        finite = is_finite(left)
        if left.device.type == "cpu" and not finite:
            return torch.full_like(value, torch.nan)
        # Householder's method: orthonormal also where columns depend on each other, or are zero.
        left = torch.linalg.qr(left).Q
        mine = matrix.t() @ left
        right = (yield Sum(mine)).view_as(mine)
        kept["residual"].view_as(matrix).addmm_(left, mine.t(), alpha=-1)
        kept["query"] = right.clone()
        return or_nan((left @ right.t()).view(-1), finite)


def _query(matrix: torch.Tensor, rank: int, state: State, draw: Draw) -> torch.Tensor:
    """[columns, rank]: the last product, with random columns where it has none that say anything."""
    columns, before = matrix.shape[1], state.get("query")
    scales = None
    if before is not None and before.shape == (columns, rank):
        before = before.to(matrix)
        scales = before.abs().amax(0)
        if scales.device.type == "cpu" and bool(scales.all()):
            return before / scales
    # Evenly from -1 to 1: any distribution will do that leaves out no direction.
    drawn = draw.alike(columns * rank, matrix.device).sub_(1 << 31).view(columns, rank).to(matrix.dtype) / (1 << 31)
    if before is None or scales is None:
        return drawn
    # A gradient of zeros would otherwise leave a query of zeros, which sees nothing ever after. Of the others only the
    # direction counts; their size would make the next product overflow or vanish.
    return torch.where(scales == 0, drawn, before / torch.where(scales == 0, 1.0, scales))
