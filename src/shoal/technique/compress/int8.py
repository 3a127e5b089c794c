"""int8: blocks of 256 elements as integers from -127 to 127 and one scale, the block's largest over 127."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import divided_up

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw

BLOCK = 256
LARGEST = 127


class int8(Compressor):
    """Eight-bit integers with a scale for each block."""

    title = "8-bit integers"
    sends = "n + s n/256"
    reaches_target = True
    passes = (31, 3.8)
    searched = True

    def words(self) -> str:
        return "gradients are sent as 8-bit integers with a scale for each block"

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return num_elements + itemsize * divided_up(num_elements, BLOCK)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Scales in the tensor's own type (its range is theirs), then a byte for each element."""
        import torch

        from shoal.comm.compress.blocks import divisors, in_blocks
        from shoal.comm.compress.payload import laid_out

        blocks = in_blocks(x, BLOCK)
        scales = blocks.abs().amax(1) / LARGEST
        # Divided, not multiplied by an inverse: that of a denormal scale is infinite.
        levels = (blocks / divisors(scales)).round_().clamp_(-LARGEST, LARGEST)
        return laid_out(scales, levels.to(torch.int8).view(-1)[: len(x)])

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.blocks import in_blocks
        from shoal.comm.compress.payload import Reader

        reader = Reader(payload)
        scales = reader.take(divided_up(num_elements, BLOCK), dtype)
        levels = in_blocks(reader.take(num_elements, torch.int8).to(dtype), BLOCK)
        return levels.mul_(scales[:, None]).view(-1)[:num_elements]
