"""Sign SGD with error feedback (Karimireddy et al. 2019): one bit for each element, read back as plus or minus the mean
magnitude of its block. That scale makes the error smaller than what was encoded, so that error feedback converges;
blocks (Zheng et al. 2019) keep rows of small gradients from drowning in the scale of large ones.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.blocks import block_sizes, in_blocks
from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.payload import Reader, laid_out, packed_bits, unpacked_bits
from shoal.comm.compress.traffic import SIGN_BLOCK, divided_up


class Sign(Codec):
    """The scales, then a bit for each element: set where it is negative."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        scales = in_blocks(x, SIGN_BLOCK).abs().sum(1).div_(block_sizes(len(x), SIGN_BLOCK, x))
        return laid_out(scales, packed_bits(x < 0))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, SIGN_BLOCK), dtype)
        bits = unpacked_bits(reader.take(divided_up(num_elements, 8), torch.uint8), num_elements)
        signs = in_blocks(bits.to(dtype).mul_(-2).add_(1), SIGN_BLOCK)
        return (signs * scales[:, None]).view(-1)[:num_elements]
