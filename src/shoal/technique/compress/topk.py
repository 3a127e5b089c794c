"""Top-k: the largest elements with their places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import SparseCompressor
from shoal.comm.compress.sizes import kept_count, sparse_bytes
from shoal.strategy.terms.arguments import real
from shoal.strategy.terms.numerals import percent

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class topk(SparseCompressor):
    """The largest elements, a fraction r of them."""

    r: float = real(0.0, 1.0, sample=0.01)

    title = "top-k"
    sends = "rn (4 + s): the largest, exactly rn of them"
    within = 0.15
    passes = (31, 0.4)
    searched = True

    def words(self) -> str:
        return (
            f"the largest {percent(self.r)} of the elements are sent with their places; the rest waits for "
            "the next step"
        )

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return sparse_bytes(kept_count(self.r, num_elements), itemsize)

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        from shoal.comm.compress.largest import largest

        return largest(x, kept_count(self.r, len(x)))
