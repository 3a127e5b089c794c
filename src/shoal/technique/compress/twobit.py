"""Two bits for each element: its sign, and whether its magnitude is above the mean of its block of 512. It is read back
as plus or minus one of two points: the mean of the block's magnitudes that are below the mean, and of those above.

SparseLoCo (Sarfi et al. 2025) sends the values of its chunk-wise top-k in 2 bits; `chunktopk` uses this code by
default. As there, each point is the mean of what it stands for: of all points for these two classes they err
least. With error feedback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import BLOCK, divided_up

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw

BITS = 2


class twobit(Compressor):
    """Two bits: the sign of each element, and which of two magnitudes of its block is nearer."""

    title = "2-bit code"
    sends = "n/4 + 2s n/512"
    within = 0.15
    passes = (55, 16)

    def words(self) -> str:
        return (
            "every element becomes a sign and one of two magnitudes, the means of the small and of the large ones of "
            "its block; the error is added to the next gradient"
        )

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return divided_up(num_elements, 8 // BITS) + 2 * itemsize * divided_up(num_elements, BLOCK)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """For each block the mean of the small and of the large magnitudes, then four elements in a byte."""
        import torch

        from shoal.comm.compress.blocks import block_sizes, in_blocks
        from shoal.comm.compress.payload import laid_out, packed_codes

        magnitudes, sizes = in_blocks(x.abs(), BLOCK), block_sizes(len(x), BLOCK, x)
        sums = magnitudes.sum(1)
        is_large = magnitudes > (sums / sizes)[:, None]
        large = is_large.to(x.dtype)  # Sums of truth values take many times as long.
        num_large, sum_large = large.sum(1), magnitudes.mul_(large).sum(1)
        low = (sums - sum_large).clamp_(min=0) / (sizes - num_large).clamp_(min=1)
        high = sum_large / num_large.clamp(min=1)
        codes = is_large.view(-1)[: len(x)].view(torch.uint8) + (x < 0).view(torch.uint8).mul_(2)
        return laid_out(low, high, packed_codes(codes, BITS))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.blocks import in_blocks
        from shoal.comm.compress.payload import Reader, unpacked_codes

        reader = Reader(payload)
        blocks = divided_up(num_elements, BLOCK)
        low, high = reader.take(blocks, dtype), reader.take(blocks, dtype)
        codes = unpacked_codes(reader.take(divided_up(num_elements, 8 // BITS), torch.uint8), BITS, num_elements)
        large, negative = in_blocks((codes & 1).to(dtype), BLOCK), in_blocks((codes & 2).to(dtype), BLOCK)
        magnitudes = torch.addcmul(low[:, None], large, (high - low)[:, None])
        return magnitudes.mul_(1 - negative).view(-1)[:num_elements]
