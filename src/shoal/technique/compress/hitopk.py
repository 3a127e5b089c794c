"""HiTopKComm (Shi et al. 2021): groups of ranks sum densely, and of each rank's shard of that sum the largest elements
go between groups. Inside its own level it is MSTopK; the groups are the level of dp inside it, or hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import SparseCompressor
from shoal.comm.compress.sizes import kept_count, sparse_bytes
from shoal.strategy.terms.arguments import real
from shoal.strategy.terms.numerals import percent
from shoal.technique.compress.mstopk import bisected

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class hitopk(SparseCompressor):
    """HiTopKComm: dense inside a host, the top-k of each shard between hosts."""

    r: float = real(0.0, 1.0, sample=0.01)

    title = "HiTopKComm"
    sends = "rn (4 + s) between hosts that reduce densely inside"
    collective_only = True
    between_groups = True
    within = 0.15
    passes = (39, 0.3)

    def words(self) -> str:
        return (
            f"hosts sum densely inside; of every shard the largest {percent(self.r)} of the elements go between hosts"
        )

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return sparse_bytes(kept_count(self.r, num_elements), itemsize)

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        return bisected(x, kept_count(self.r, len(x)))
