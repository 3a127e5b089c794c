"""QSGD (Alistarh et al. 2017): a sign and a level for each element, the level one of 2**bits - 1 parts of the largest
magnitude in its block of 512, rounded at random so that the expectation is the element.

Blocks, and the maximum as their norm, are the variant that the paper runs in practice: with the Euclidean norm of a
whole tensor of n elements the variance grows with sqrt(n).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import BLOCK, divided_up
from shoal.strategy.terms.arguments import integer
from shoal.strategy.terms.numerals import counted

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class qsgd(Compressor):
    """QSGD: random rounding to a few levels of the norm."""

    bits: int = integer(1, 16, sample=4)

    title = "QSGD"
    sends = "(bits + 1) n/8 + s n/512"
    loss = "unbiased"
    reaches_target = True
    passes = (78, 24)

    def words(self) -> str:
        return f"every element is rounded at random to one of the levels that {counted(self.bits, 'bit')} can encode"

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return (self.bits + 1) * divided_up(num_elements, 8) + itemsize * divided_up(num_elements, BLOCK)

    @property
    def levels(self) -> int:
        return 2**self.bits - 1

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Scales, then `bits` bits for each element's level, then a bit for its sign: set where it is negative."""
        from shoal.comm.compress.blocks import rounded_at_random
        from shoal.comm.compress.payload import laid_out, packed_bits, packed_numbers

        scales, level = rounded_at_random(x, self.levels, draw)
        return laid_out(scales, packed_numbers(level.int(), self.bits), packed_bits(x < 0))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.blocks import from_levels
        from shoal.comm.compress.payload import Reader, unpacked_bits, unpacked_numbers

        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, BLOCK), dtype)
        plane = divided_up(num_elements, 8)
        level = unpacked_numbers(reader.take(self.bits * plane, torch.uint8), self.bits, num_elements).to(dtype)
        negative = unpacked_bits(reader.take(plane, torch.uint8), num_elements)
        return from_levels(negative.to(dtype).mul_(-2).add_(1).mul_(level), scales, self.levels)
