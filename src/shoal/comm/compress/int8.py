"""int8: blocks of 256 elements as whole numbers from -127 to 127 and one scale, the block's largest over 127."""

from __future__ import annotations

import torch

from shoal.comm.compress.blocks import divisors, in_blocks
from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.payload import Reader, laid_out
from shoal.comm.compress.traffic import INT8_BLOCK, divided_up

LARGEST = 127


class Int8(Codec):
    """Scales in the tensor's own type (its range is theirs), then a byte for each element."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        blocks = in_blocks(x, INT8_BLOCK)
        scales = blocks.abs().amax(1) / LARGEST
        # Divided, not multiplied by an inverse: that of a denormal scale is infinite.
        whole = (blocks / divisors(scales)).round_().clamp_(-LARGEST, LARGEST)
        return laid_out(scales, whole.to(torch.int8).view(-1)[: len(x)])

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, INT8_BLOCK), dtype)
        whole = in_blocks(reader.take(num_elements, torch.int8).to(dtype), INT8_BLOCK)
        return whole.mul_(scales[:, None]).view(-1)[:num_elements]
