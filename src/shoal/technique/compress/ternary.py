"""TernGrad (Wen et al. 2017): each element becomes -1, 0 or +1 times the largest magnitude in its block of 512, at
random so that the expectation is the element. Five of them to a byte: 1.6 bits each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import BLOCK, TRITS_A_BYTE, divided_up

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class ternary(Compressor):
    """TernGrad: each element becomes -1, 0 or 1 at random, times the largest."""

    title = "TernGrad"
    sends = "n/5 + s n/512"
    loss = "unbiased"
    reaches_target = True
    passes = (41, 13)
    searched = True

    def words(self) -> str:
        return "every element becomes -1, 0 or +1 at random, times the largest"

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return divided_up(num_elements, TRITS_A_BYTE) + itemsize * divided_up(num_elements, BLOCK)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Scales, then the numbers -1, 0, 1 as 0, 1, 2."""
        import torch

        from shoal.comm.compress.blocks import divisors, in_blocks
        from shoal.comm.compress.payload import laid_out, packed_trits

        blocks = in_blocks(x.abs(), BLOCK)
        scales = blocks.amax(1)
        exact = blocks.div_(divisors(scales)).view(-1)[: len(x)]
        # In bytes, which is faster than in the tensor's type: 1, plus or minus one where the random draw selects it.
        chosen = (draw.chances(len(x), x) < exact).view(torch.uint8)
        return laid_out(scales, packed_trits(1 + chosen - 2 * (chosen * (x < 0).view(torch.uint8))))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.blocks import from_levels
        from shoal.comm.compress.payload import Reader, unpacked_trits

        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, BLOCK), dtype)
        packed = reader.take(divided_up(num_elements, TRITS_A_BYTE), torch.uint8)
        return from_levels(unpacked_trits(packed, num_elements).to(dtype).sub_(1), scales, 1)
