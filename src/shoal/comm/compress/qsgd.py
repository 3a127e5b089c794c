"""QSGD (Alistarh et al. 2017): a sign and a level for each element, the level one of 2**bits - 1 parts of the largest
magnitude in its block of 512, rounded at random so that the expectation is the element.

Blocks, and the maximum as their norm, are the variant that the paper runs in practice: with the Euclidean norm of a
whole tensor of n elements the variance grows with sqrt(n).
"""

from __future__ import annotations

import torch

from shoal.comm.compress.blocks import from_levels, rounded_at_random
from shoal.comm.compress.codec import Codec
from shoal.comm.compress.method import Draw
from shoal.comm.compress.payload import Reader, laid_out, packed_numbers, unpacked_numbers
from shoal.comm.compress.traffic import LEVEL_BLOCK, divided_up


class Qsgd(Codec):
    """Scales, then bits + 1 bits for each element: the sign in the highest of them."""

    def __init__(self, *, bits: int) -> None:
        self.bits = bits
        self.levels = 2**bits - 1

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        scales, signed = rounded_at_random(x, self.levels, draw)
        numbers = signed.abs().to(torch.int32) | ((signed < 0).int() << self.bits)
        return laid_out(scales, packed_numbers(numbers, self.bits + 1))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, LEVEL_BLOCK), dtype)
        packed = reader.take((self.bits + 1) * divided_up(num_elements, 8), torch.uint8)
        numbers = unpacked_numbers(packed, self.bits + 1, num_elements)
        signed = torch.where(numbers > self.levels, self.levels + 1 - numbers, numbers).to(dtype)
        return from_levels(signed, scales, self.levels)
