"""Sign SGD with error feedback (Karimireddy et al. 2019): one bit for each element, read back as plus or minus the mean
magnitude of all. That scale makes the error smaller than what was encoded, so that error feedback converges.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.payload import Reader, laid_out, packed_bits, unpacked_bits
from shoal.comm.compress.traffic import divided_up


class Sign(Codec):
    """The scale, then a bit for each element: set where it is negative."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        scale = x.abs().mean(dtype=torch.float64).to(x.dtype)
        return laid_out(scale, packed_bits(x < 0))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        reader = Reader(payload)
        scale = reader.take(1, dtype)
        bits = unpacked_bits(reader.take(divided_up(num_elements, 8), torch.uint8), num_elements)
        return torch.cat([scale, -scale]).index_select(0, bits.int())
