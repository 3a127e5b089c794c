"""1-bit SGD (Seide et al. 2014): one bit holds the sign of an element, and it is read back as the mean of
those of its block that lie there. (The paper's blocks are columns of a layer.) With error feedback, without which it
does not converge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import BLOCK, divided_up

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class onebit(Compressor):
    """1-bit SGD: the sign of each element, and the mean of the positive and of the negative ones."""

    title = "1-bit SGD"
    sends = "n/8 + 2s n/512"
    within = 0.3
    passes = (39, 9.8)

    def words(self) -> str:
        return (
            "sends one sign bit per element and the means of the positive and of the negative values; the residual is "
            "added to the next gradient"
        )

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return divided_up(num_elements, 8) + 2 * itemsize * divided_up(num_elements, BLOCK)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """For each block the mean of those that are not negative and of those that are, then a bit for each element."""
        from shoal.comm.compress.blocks import block_sizes, in_blocks
        from shoal.comm.compress.payload import laid_out, packed_bits

        blocks, negative = in_blocks(x, BLOCK), x < 0
        num_below = in_blocks(negative.to(x.dtype), BLOCK).sum(1)
        num_above = block_sizes(len(x), BLOCK, x) - num_below
        above = blocks.clamp(min=0).sum(1) / num_above.clamp(min=1)
        below = blocks.clamp(max=0).sum(1) / num_below.clamp(min=1)
        return laid_out(above, below, packed_bits(negative))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.blocks import in_blocks
        from shoal.comm.compress.payload import Reader, unpacked_bits

        reader = Reader(payload)
        blocks = divided_up(num_elements, BLOCK)
        above, below = reader.take(blocks, dtype), reader.take(blocks, dtype)
        bits = unpacked_bits(reader.take(divided_up(num_elements, 8), torch.uint8), num_elements)
        negative = in_blocks(bits.to(dtype), BLOCK)
        return torch.addcmul(above[:, None], negative, (below - above)[:, None]).view(-1)[:num_elements]
