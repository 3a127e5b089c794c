"""Natural compression (Horvath et al. 2019): every element becomes one of the two powers of two around it, at random so
that the expectation is the element. A sign and an exponent are sent, 9 bits of 32, and nothing is divided or scaled.

The relative variance is at most 1/8, whatever the size of the tensor: blocks and scales are not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import divided_up

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class natural(Compressor):
    """Natural compression: random rounding to powers of two."""

    title = "natural compression"
    sends = "n s/4 + n/8"
    loss = "unbiased"
    passes = (49, 14)

    def words(self) -> str:
        return "every element becomes one of the two powers of two around it, at random; sign and exponent are sent"

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return num_elements * itemsize // 4 + divided_up(num_elements, 8)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Exponents in a byte (two of float64), then a bit for each sign: set where it is negative."""
        from shoal.comm.compress.payload import laid_out, packed_bits

        words, narrow, shift, largest = _layout(x.dtype)
        bits = x.abs().view(words)
        exponents = bits >> shift
        # Where an element lies between its power of two and the next; denormals lie between 0 and the smallest.
        fraction = bits.bitwise_and_((1 << shift) - 1).to(x.dtype).mul_(2.0**-shift)
        # What is finite stays so: beyond the largest power there is none to round to. Infinity and NaN stay infinite.
        up = (draw.chances(len(x), x) < fraction).logical_and_(exponents < largest)
        return laid_out(exponents.add_(up).to(narrow), packed_bits(x < 0))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        from shoal.comm.compress.payload import Reader, unpacked_bits

        words, narrow, shift, _ = _layout(dtype)
        reader = Reader(payload)
        powers = (reader.take(num_elements, narrow).to(words) << shift).view(dtype)
        negative = unpacked_bits(reader.take(divided_up(num_elements, 8), torch.uint8), num_elements)
        return negative.to(dtype).mul_(-2).add_(1).mul_(powers)


def _layout(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype, int, int]:
    """Of a floating-point type: integers of its width, integers that hold its exponent, the bits of its fraction, and
    the exponent of its largest power of two."""
    import torch

    if dtype == torch.float32:
        return torch.int32, torch.uint8, 23, 254
    return torch.int64, torch.int16, 52, 2046
