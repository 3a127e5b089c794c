"""1-bit SGD (Seide et al. 2014): one bit says on which side of zero an element lies, and it is read back as the mean of
those of its block that lie there. (The paper's blocks are columns of a layer.) With error feedback, without which it
does not converge.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.blocks import block_sizes, in_blocks
from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.payload import Reader, laid_out, packed_bits, unpacked_bits
from shoal.comm.compress.traffic import SIGN_BLOCK, divided_up


class OneBit(Codec):
    """For each block the mean of those that are not negative and of those that are, then a bit for each element."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        blocks, negative = in_blocks(x, SIGN_BLOCK), x < 0
        num_below = in_blocks(negative.to(x.dtype), SIGN_BLOCK).sum(1)
        num_above = block_sizes(len(x), SIGN_BLOCK, x) - num_below
        above = blocks.clamp(min=0).sum(1) / num_above.clamp(min=1)
        below = blocks.clamp(max=0).sum(1) / num_below.clamp(min=1)
        return laid_out(above, below, packed_bits(negative))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        blocks = divided_up(num_elements, SIGN_BLOCK)
        above, below = reader.take(blocks, dtype), reader.take(blocks, dtype)
        bits = unpacked_bits(reader.take(divided_up(num_elements, 8), torch.uint8), num_elements)
        negative = in_blocks(bits.to(dtype), SIGN_BLOCK)
        return torch.addcmul(above[:, None], negative, (below - above)[:, None]).view(-1)[:num_elements]
