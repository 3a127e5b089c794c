"""MSTopK (Shi et al. 2021): the k largest elements by bisecting a threshold, without any sort.

The threshold is bisected on the bits of the magnitudes, which order as whole numbers do: 31 halvings find it whatever
the values are (63 in float64), one huge element or a thousand equal ones included. What is found to lie above or below
is looked at no more, so the work is that of two or three passes. Exactly k come out: elements equal to the last
threshold fill up, in the order of their places.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.codec import SparseCodec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.topk import places_where
from shoal.comm.compress.traffic import kept_count


class MsTopK(SparseCodec):
    """A fraction r of the elements: those of the largest magnitude, found by bisection."""

    def __init__(self, *, fraction: float) -> None:
        self.fraction = fraction

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        return bisected(x, kept_count(self.fraction, len(x)))


def bisected(x: torch.Tensor, count: int) -> torch.Tensor:
    """The places of exactly `count` elements, no other being larger than any of them."""
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
    found = places_where(mask)
    return bits.index_select(0, found), found if places is None else places.index_select(0, found)
