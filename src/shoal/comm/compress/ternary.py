"""TernGrad (Wen et al. 2017): each element becomes -1, 0 or +1 times the largest magnitude in its block of 512, at
random so that the expectation is the element. Five of them to a byte: 1.6 bits each.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.blocks import divisors, from_levels, in_blocks
from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.payload import Reader, laid_out, packed_trits, unpacked_trits
from shoal.comm.compress.traffic import LEVEL_BLOCK, TRITS_A_BYTE, divided_up


class Ternary(Codec):
    """Scales, then the numbers -1, 0, 1 as 0, 1, 2."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        blocks = in_blocks(x.abs(), LEVEL_BLOCK)
        scales = blocks.amax(1)
        exact = blocks.div_(divisors(scales)).view(-1)[: len(x)]
        # In bytes, which is faster than in the tensor's type: 1, plus or minus one where the dice say so.
        chosen = (draw.chances(len(x), x) < exact).view(torch.uint8)
        return laid_out(scales, packed_trits(1 + chosen - 2 * (chosen * (x < 0).view(torch.uint8))))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, LEVEL_BLOCK), dtype)
        packed = reader.take(divided_up(num_elements, TRITS_A_BYTE), torch.uint8)
        return from_levels(unpacked_trits(packed, num_elements).to(dtype).sub_(1), scales, 1)
