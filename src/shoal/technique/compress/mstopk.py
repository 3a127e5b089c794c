"""MSTopK (Shi et al. 2021): the k largest elements by bisecting a threshold, without any sort.

The threshold is bisected on the bits of the magnitudes, which order as whole numbers do: 31 halvings find it whatever
the values are (63 in float64), one huge element or a thousand equal ones included. What is found to lie above or below
is looked at no more, so the work is that of two or three passes. Exactly k come out: elements equal to the last
threshold fill up, in the order of their places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import SparseCompressor
from shoal.comm.compress.sizes import kept_count, sparse_bytes
from shoal.strategy.terms.arguments import real
from shoal.strategy.terms.numerals import percent

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class mstopk(SparseCompressor):
    """MSTopK: exactly k elements above a threshold found by bisection, without a sort."""

    r: float = real(0.0, 1.0, sample=0.01)

    title = "MSTopK"
    sends = "rn (4 + s): the largest, found without a sort"
    within = 0.15
    passes = (39, 0.3)

    def words(self) -> str:
        return (
            f"the largest {percent(self.r)} of the elements, found by bisecting a threshold instead of "
            "sorting, are sent"
        )

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return sparse_bytes(kept_count(self.r, num_elements), itemsize)

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        return bisected(x, kept_count(self.r, len(x)))


def bisected(x: torch.Tensor, count: int) -> torch.Tensor:
    """The places of exactly `count` elements, no other being larger than any of them."""
    import torch

    if count >= len(x):
        return torch.arange(len(x), device=x.device)
    magnitudes = x.abs()
    bits = magnitudes.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    low, high = 0, int(bits.max()) + 1
    # Most tensors have their k largest above the mean (where the paper starts, too) and few elements far above it.
    mean = magnitudes.mean()
    guesses = [int(guess.view(bits.dtype)) for guess in (mean, 2 * mean)]
    places: torch.Tensor | None = None  # of the candidates; None: all
    chosen: list[torch.Tensor] = []
    # Candidates have their bits in low ... high - 1, and `count` of them, at most all, are still to be chosen.
    while high - low > 1 and count < len(bits):
        middle = guesses.pop() if guesses else (low + high) // 2
        if not low < middle < high:
            continue
        above = bits >= middle
        num_above = int(above.count_nonzero())
        if num_above >= count:
            low = middle
            if num_above < len(bits):
                bits, places = _narrowed(bits, places, above)
        else:
            high = middle
            if num_above:
                chosen.append(_narrowed(bits, places, above)[1])
                bits, places = _narrowed(bits, places, above.logical_not_())
                count -= num_above
    rest = torch.arange(count, device=x.device) if places is None else places[:count]
    return torch.cat([*chosen, rest])


def _narrowed(bits: torch.Tensor, places: torch.Tensor | None, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from shoal.comm.compress.largest import places_where

    found = places_where(mask)
    return bits.index_select(0, found), found if places is None else places.index_select(0, found)
