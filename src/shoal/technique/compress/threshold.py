"""Threshold: every element whose magnitude reaches t, with its place. How many these are is up to the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import SparseCompressor
from shoal.strategy.terms.arguments import real

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class threshold(SparseCompressor):
    """Every element whose magnitude is at least t."""

    t: float = real(0.0, 1e30, sample=0.001)

    title = "threshold"
    sends = "c (4 + s), c the elements of the mean gradient that reach t"
    sized_by_data = True
    within = 0.15

    def words(self) -> str:
        return f"elements of magnitude {self.t:g} and more are sent with their places; the rest waits for the next step"

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.largest import places_where

        # A threshold too small for the tensor's type would become zero, and send the zeros, too.
        least = max(self.t, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps)
        # Not "is at least t": what is no number must be sent, or it would stay in the residual permanently.
        return places_where((x.abs() < least).logical_not_())
