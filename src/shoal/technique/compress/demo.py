"""DeMo (Peng et al. 2024): the fast components of a momentum are sent and taken out of it, the slow ones stay.

    m <- decay m + g;  C = DCT(m) by chunks, send the largest of C;  m <- m - DCT^-1(sent)

Every rank has its own momentum; what ranks agree on is the sum of what they sent. A chunk is `side` x `side`
consecutive elements, transformed in both directions by the orthonormal cosine transform. (The paper's chunks are tiles
of a matrix; a rank's part of a parameter under ZeRO has none.) `signs=True` is the paper's step: the sign of the sum.
Then the job's optimiser should be plain SGD with a small rate, without clipping.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from shoal.comm.compress.chunks import CODES, ChunkCompressor, Chunks
from shoal.strategy.terms.arguments import choice, flag, integer, real
from shoal.strategy.terms.numerals import percent

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.exchange import Total
    from shoal.comm.compress.given import Draw, Over, State


class demo(ChunkCompressor):
    """DeMo: the largest cosine coefficients of each chunk of a local momentum, a fraction r of them."""

    r: float = real(0.0, 1.0, sample=0.03)
    side: int = integer(2, 1 << 10, default=64, kw_only=True)
    code: str = choice(*CODES, default="none", kw_only=True)
    decay: float = real(0.0, 1.0, default=0.999, kw_only=True)
    signs: bool = flag(default=False, kw_only=True)

    title = "decoupled momentum (DeMo)"
    sends = "rn (12/8 + s): places in a chunk of 64 x 64 have 12 bits"
    within = 0.3
    passes = (150, 6)

    def chunks(self) -> Chunks:
        return Chunks(self.r, self.side**2, self.code)

    def memory(self) -> float:
        return self.decay

    def words(self) -> str:
        signs = "; the step is the sign of their sum" if self.signs else ""
        return (
            f"the largest {percent(self.r)} of the cosine coefficients of every chunk of a local momentum are sent and "
            f"taken out of it{signs}"
        )

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        return self._both_ways(rows, cosine_transform(self.side, rows.dtype, rows.device).t())

    def turned_back(self, rows: torch.Tensor) -> torch.Tensor:
        return self._both_ways(rows, cosine_transform(self.side, rows.dtype, rows.device))

    def _both_ways(self, rows: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Each chunk X as (X right)^T right: two products of tall matrices, faster than a batch of small ones."""
        once = (rows.view(-1, self.side) @ right).view(-1, self.side, self.side)
        return (once.transpose(1, 2).reshape(-1, self.side) @ right).view_as(rows)

    def pushed_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        # The sign of a sum is taken by whoever has the sum.
        return None if self.signs else super().pushed_bytes(num_elements, itemsize, step=step)

    def total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        total = yield from super().total(value, shape, kept, over, draw)
        # NaN has the sign NaN: an overflow is still seen.
        return total.sign_() if self.signs else total


@cache
def cosine_transform(size: int, dtype: Any, device: Any = "cpu") -> torch.Tensor:
    """[size, size], the orthonormal DCT-II: row k is cos(pi k (2n + 1) / 2 size), of length 1."""
    import torch

    at = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(torch.pi / (2 * size) * at[:, None] * (2 * at + 1)) * (2 / size) ** 0.5
    rows[0] *= 0.5**0.5
    return rows.to(device, dtype)
