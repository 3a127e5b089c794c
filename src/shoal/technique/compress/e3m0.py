"""E3M0, four bits for each element: a sign and an exponent of three bits, no mantissa (Streaming DiLoCo, Douillard et
al. 2025). The points are 0 and plus or minus 1, 1/2, ... 1/64 of the largest magnitude in the element's block of 512;
an element becomes the nearest one (below 3/4 of the smallest, 0). Payloads are decoded before they are summed, so sums
have the tensor's own precision.

The paper sends outer gradients so, without error feedback. Here what rounding leaves out is kept, as for every code
that is not right on average: an element below 1/86 of its block's largest would otherwise never be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import BLOCK, divided_up

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw

BITS = 4
MAGNITUDES = (0.0, *(2.0**exponent for exponent in range(-6, 1)))
"""What the three bits of the exponent stand for, as a fraction of the block's largest magnitude."""


class e3m0(Compressor):
    """E3M0: a sign and a 3-bit exponent for each element, and a scale for each block."""

    title = "4-bit floating point (E3M0)"
    sends = "n/2 + s n/512"
    passes = (42, 12)
    searched = True

    def words(self) -> str:
        return "every element becomes a sign and one of 7 powers of two below the block's largest, or 0: 4 bits"

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return divided_up(num_elements, 8 // BITS) + itemsize * divided_up(num_elements, BLOCK)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Scales, then two elements in a byte."""
        import torch

        from shoal.comm.compress.blocks import divisors, in_blocks
        from shoal.comm.compress.payload import laid_out, packed_codes

        blocks = in_blocks(x.abs(), BLOCK)
        scales = blocks.amax(1)
        # Half a unit of the exponent is added to the bits: a mantissa of 1.5 or more makes it the next power of two.
        words, fraction, bias = (torch.int32, 23, 127) if x.dtype == torch.float32 else (torch.int64, 52, 1023)
        bits = blocks.div_(divisors(scales)).view(-1)[: len(x)].view(words)
        exponents = bits.add_(1 << (fraction - 1)).bitwise_right_shift_(fraction).sub_(bias - 7).clamp_(0, 7)
        return laid_out(scales, packed_codes(exponents.to(torch.uint8).add_((x < 0).view(torch.uint8), alpha=8), BITS))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.blocks import in_blocks
        from shoal.comm.compress.payload import Reader, unpacked_codes

        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, BLOCK), dtype)
        codes = unpacked_codes(reader.take(divided_up(num_elements, 8 // BITS), torch.uint8), BITS, num_elements)
        points = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], dtype=dtype, device=payload.device)
        return in_blocks(points.index_select(0, codes.int()), BLOCK).mul_(scales[:, None]).view(-1)[:num_elements]
