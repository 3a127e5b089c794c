"""Sign SGD with error feedback (Karimireddy et al. 2019): one bit for each element, read back as plus or minus the mean
magnitude of its block. That scale makes the error smaller than what was encoded, so that error feedback converges;
blocks (Zheng et al. 2019) keep rows of small gradients from drowning in the scale of large ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import BLOCK, divided_up

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class sign(Compressor):
    """Sign SGD with error feedback: the sign of each element and one scale."""

    title = "sign SGD with error feedback"
    sends = "n/8 + s n/512"
    within = 0.3
    passes = (33, 8.6)
    searched = True

    def words(self) -> str:
        return "the sign of every element is sent, with one scale; the error waits for the next step"

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return divided_up(num_elements, 8) + itemsize * divided_up(num_elements, BLOCK)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The scales, then a bit for each element: set where it is negative."""
        from shoal.comm.compress.blocks import block_sizes, in_blocks
        from shoal.comm.compress.payload import laid_out, packed_bits

        scales = in_blocks(x, BLOCK).abs().sum(1).div_(block_sizes(len(x), BLOCK, x))
        return laid_out(scales, packed_bits(x < 0))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.blocks import in_blocks
        from shoal.comm.compress.payload import Reader, unpacked_bits

        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, BLOCK), dtype)
        bits = unpacked_bits(reader.take(divided_up(num_elements, 8), torch.uint8), num_elements)
        signs = in_blocks(bits.to(dtype).mul_(-2).add_(1), BLOCK)
        return (signs * scales[:, None]).view(-1)[:num_elements]
