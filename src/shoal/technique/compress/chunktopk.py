"""Chunk-wise top-k with a decaying memory, the compression of SparseLoCo (Sarfi et al. 2025):

    e <- decay e + g,  send the largest of each chunk of e, quantised;  e <- e - sent

On an outer exchange without outer momentum (`diloco(h, momentum=0.0)`) g is the pseudo-gradient, and this is
SparseLoCo. The decay forgets what was too small to be sent for long, which by then belongs to another place in the
space of parameters; `decay=1.0` is plain error feedback.
"""

from __future__ import annotations

from shoal.comm.compress.chunks import CODES, ChunkCompressor, Chunks
from shoal.strategy.terms.arguments import choice, integer, real
from shoal.strategy.terms.numerals import percent


class chunktopk(ChunkCompressor):
    """The largest elements of each chunk, a fraction r of them, their values in few bits."""

    r: float = real(0.0, 1.0, sample=0.03)
    chunk: int = integer(2, 1 << 20, default=4096, kw_only=True)
    code: str = choice(*CODES, default="twobit", kw_only=True)
    decay: float = real(0.0, 1.0, default=0.95, kw_only=True)

    title = "chunk-wise top-k (SparseLoCo)"
    sends = "rn (12/8 + 2/8) + 2s rn/512: places in a chunk of 4096 have 12 bits, values 2"
    within = 0.15
    passes = (50, 4)
    searched = True

    def words(self) -> str:
        return (
            f"the largest {percent(self.r)} of every chunk of {self.chunk} elements are sent with their places; the "
            f"rest is kept, times {self.decay:g}, for the next step"
        )

    def chunks(self) -> Chunks:
        return Chunks(self.r, self.chunk, self.code)

    def memory(self) -> float:
        return self.decay
