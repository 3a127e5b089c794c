"""1-bit SGD (Seide et al. 2014): one bit says on which side of zero an element lies, and it is read back as the mean of
all elements on that side. With error feedback, without which it does not converge.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.payload import Reader, laid_out, packed_bits, unpacked_bits
from shoal.comm.compress.traffic import divided_up


class OneBit(Codec):
    """The mean of those that are not negative and of those that are, then a bit for each element."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        negative = x < 0
        num_negative = int(negative.count_nonzero())
        below = x.clamp(max=0).sum(dtype=torch.float64)
        above = x.clamp(min=0).sum(dtype=torch.float64)
        means = torch.stack([above / max(1, len(x) - num_negative), below / max(1, num_negative)])
        return laid_out(means.to(x.dtype), packed_bits(negative))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        means = reader.take(2, dtype)
        bits = unpacked_bits(reader.take(divided_up(num_elements, 8), torch.uint8), num_elements)
        return means.index_select(0, bits.int())
