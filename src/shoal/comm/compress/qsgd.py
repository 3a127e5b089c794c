"""QSGD (Alistarh et al. 2017): a sign and a level for each element, the level one of 2**bits - 1 parts of the largest
magnitude in its block of 512, rounded at random so that the expectation is the element.

Blocks, and the maximum as their norm, are the variant that the paper runs in practice: with the Euclidean norm of a
whole tensor of n elements the variance grows with sqrt(n).
"""

from __future__ import annotations

import torch

from shoal.comm.compress.blocks import from_levels, rounded_at_random
from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.payload import Reader, laid_out, packed_bits, packed_numbers, unpacked_bits, unpacked_numbers
from shoal.comm.compress.traffic import LEVEL_BLOCK, divided_up


class Qsgd(Codec):
    """Scales, then `bits` bits for each element's level, then a bit for its sign: set where it is negative."""

    def __init__(self, *, bits: int) -> None:
        self.bits = bits
        self.levels = 2**bits - 1

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        scales, level = rounded_at_random(x, self.levels, draw)
        return laid_out(scales, packed_numbers(level.to(torch.int32), self.bits), packed_bits(x < 0))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, LEVEL_BLOCK), dtype)
        plane = divided_up(num_elements, 8)
        level = unpacked_numbers(reader.take(self.bits * plane, torch.uint8), self.bits, num_elements).to(dtype)
        negative = unpacked_bits(reader.take(plane, torch.uint8), num_elements)
        return from_levels(negative.to(dtype).mul_(-2).add_(1).mul_(level), scales, self.levels)
