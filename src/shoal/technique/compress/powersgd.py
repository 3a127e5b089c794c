"""PowerSGD (Vogels et al. 2019): a gradient matrix as a product of two thin ones, by one step of power iteration.

With a query Q, P = M Q is summed over ranks and made orthonormal, then Q = M^T P is summed: both all-reduces of thin
matrices, and P Q^T is the projection of the summed gradient on the columns of P. The sum of Q is the next step's query
(a warm start), the same on all ranks. Each rank keeps M - P (M^T P)^T, its own part of what the projection leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import matrix_of
from shoal.strategy.terms.arguments import LARGEST_SIZE, integer
from shoal.strategy.terms.compress import CompressTerm, Transfer

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.exchange import Total
    from shoal.comm.compress.given import Draw, Over, State


class powersgd(Compressor):
    """PowerSGD: each gradient matrix as a product of two thin ones, by one step of power iteration."""

    rank: int = integer(1, LARGEST_SIZE, sample=4)

    title = "PowerSGD"
    sends = "(a + b) rank s of an a x b matrix (the first dimension by all others)"
    whole_rows = True
    extras = ("query",)
    within = 0.15
    passes = (26, 0)
    searched = True

    def words(self) -> str:
        return (
            f"each gradient matrix is sent as a product of two thin ones of rank {self.rank}; the error "
            "waits for the next step"
        )

    @classmethod
    def measured(cls) -> tuple[CompressTerm, ...]:
        return cls(4), cls(16)

    def transfers(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        width = effective_rank(self.rank, shape)
        return [Transfer("all_reduce", size * width * itemsize) for size in matrix_of(shape)]

    def ring_bytes(self, elements: Any, sides: Any, *, ranks: Any, itemsize: int) -> tuple[Any, float] | None:
        return itemsize * self.rank * sides, 2.0

    def total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        import torch

        from shoal.comm.compress.exchange import Sum
        from shoal.comm.compress.finite import is_finite, or_nan

        matrix = value.view(matrix_of(shape))
        query = _query(matrix, effective_rank(self.rank, shape), kept, draw)
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


def effective_rank(rank: int, shape: Sequence[int]) -> int:
    """A product of two matrices never has a higher rank than fits."""
    return min(rank, *matrix_of(shape))


def _query(matrix: torch.Tensor, rank: int, state: State, draw: Draw) -> torch.Tensor:
    """[columns, rank]: the last product, with random columns where it has none of use."""
    import torch

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
