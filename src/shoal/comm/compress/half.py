"""fp16: every element in 16 bits, times a power of two that brings the largest one just below the range's end.

Gradients are far from the middle of float16's range: those of 1e6 would overflow, and elements below 6e-8 vanish. The
exponent is chosen from the tensor itself and travels with it, so nothing overflows, and elements down to 2**-39 of the
largest survive. Scales of different ranks differ, so halves do not add: they are summed by parts
(`exchange.summed_by_parts`) in the tensor's own precision. That takes the bytes of an all-reduce of halves, needs no
round to agree on a scale, and rounds twice where an all-reduce would round at every addition.
"""

from __future__ import annotations

import math

import torch

from shoal.comm.compress.codec import Codec
from shoal.comm.compress.exchange import summed_by_parts
from shoal.comm.compress.method import Draw, Method, Over, State, flat, spoilt_if_not_finite

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
    """Half precision on the wire. The error, half a unit in the eleventh bit, is not kept."""

    codec = Half()

    def reduce(self, x: torch.Tensor, state: State, over: Over, draw: Draw) -> torch.Tensor:
        if x.numel() == 0:
            return x.clone()
        value = spoilt_if_not_finite(flat(x))
        return summed_by_parts(value, self.codec, over, draw).view(x.shape)
