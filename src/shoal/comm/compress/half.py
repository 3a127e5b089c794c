"""fp16: every element in 16 bits, times a power of two that brings the largest one just below the range's end.

Gradients are far from the middle of float16's range: those of 1e6 would overflow, and elements below 6e-8 vanish. The
exponent is chosen from the tensor itself and travels with it, so nothing overflows, and elements down to 2**-39 of the
largest survive. Scales of different ranks differ, so halves do not add: they are summed by parts, in the tensor's own
precision. That needs no round to agree on a scale, and rounds twice where an all-reduce would round at every addition.
"""

from __future__ import annotations

import math

import torch

from shoal.comm.compress.blocks import filled_up
from shoal.comm.compress.codec import Codec, added
from shoal.comm.compress.exchange import Deal, Gather
from shoal.comm.compress.given import Draw, Over, State
from shoal.comm.compress.method import Method, Total
from shoal.comm.compress.traffic import divided_up

LARGEST_EXPONENT = 15
"""Elements are brought below 2**15: float16 ends at 65504."""


class Half(Codec):
    """One float16 for the exponent (a whole number), then one for each element."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        exponent = _exponent(x)
        halves = x.new_empty(len(x) + 1, dtype=torch.float16)
        halves[0] = exponent
        halves[1:] = x * 2.0**exponent
        return halves.view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        halves = payload.view(torch.float16)
        return halves[1:].to(dtype).mul_(2.0 ** -float(halves[0]))


def _exponent(x: torch.Tensor) -> int:
    if len(x) == 0:
        return 0
    largest = max(abs(float(end)) for end in torch.aminmax(x))
    if not math.isfinite(largest) or largest == 0:
        return 0
    # Neither the factor nor its inverse may overflow in the tensor's own type.
    limit = 126 if x.dtype == torch.float32 else 1022
    return max(-limit, min(limit, LARGEST_EXPONENT - math.frexp(largest)[1]))


class Fp16(Method):
    """Half precision on the wire. The error, half a unit in the eleventh bit, is not kept.

    Each rank decodes and sums one part of all ranks, and sends the sum, encoded again, to all: as many bytes as a ring
    all-reduce of halves.
    """

    codec = Half()

    def _total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        size = divided_up(len(value), over.size)
        parts = filled_up(value, over.size * size).view(over.size, size)
        arrived = yield Deal(torch.stack([self.codec.encode(part, draw) for part in parts]))
        mine = added(list(arrived), self.codec, parts[0], draw)
        sums = yield Gather(self.codec.encode(mine, draw))
        return torch.cat([self.codec.decode(each, size, value.dtype, draw) for each in sums])[: len(value)]
