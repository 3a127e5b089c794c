"""fp16: every element in 16 bits, times a power of two that brings the largest one just below the range's end.

Gradients are far from the middle of float16's range: those of 1e6 would overflow, and elements below 6e-8 vanish. The
exponent is chosen from the tensor itself and travels with it, so nothing overflows, and elements down to 2**-39 of the
largest survive. Scales of different ranks differ, so halves do not add: they are summed by parts, in the tensor's own
precision. That needs no round to agree on a scale, and rounds twice where an all-reduce would round at every addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import divided_up
from shoal.strategy.terms.compress import Transfer

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.exchange import Total
    from shoal.comm.compress.given import Draw, Over, State

HALF_BYTES = 2
LARGEST_EXPONENT = 15
"""Elements are brought below 2**15: float16 ends at 65504."""


class fp16(Compressor):
    """Half precision on the wire."""

    title = "half precision on the wire"
    sends = "2n"
    loss = "rounding"
    reaches_target = True
    passes = (33, 0)

    def words(self) -> str:
        return "gradients are sent in 16 bits"

    def transfers(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        parts = ranks * HALF_BYTES * (divided_up(math.prod(shape), ranks) + 1)
        return [Transfer("all_to_all", parts), Transfer("all_gather", parts)]

    def pushed_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return HALF_BYTES * (num_elements + 1)

    def ring_bytes(self, elements: Any, sides: Any, *, ranks: Any, itemsize: int) -> tuple[Any, float] | None:
        return HALF_BYTES * elements, 2.0

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """One float16 for the exponent (a whole number), then one for each element."""
        import torch

        exponent = _exponent(x)
        halves = x.new_empty(len(x) + 1, dtype=torch.float16)
        halves[0] = exponent
        halves[1:] = x * 2.0**exponent
        return halves.view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        import torch

        halves = payload.view(torch.float16)
        return halves[1:].to(dtype).mul_(2.0 ** -float(halves[0]))

    def total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        """Each rank decodes and sums one part of all ranks, and sends the sum, encoded again, to all: as many bytes as
        a ring all-reduce of halves. The error, half a unit in the eleventh bit, is not kept."""
        import torch

        from shoal.comm.compress.blocks import filled_up
        from shoal.comm.compress.exchange import AllToAll, Gather

        size = divided_up(len(value), over.size)
        parts = filled_up(value, over.size * size).view(over.size, size)
        arrived = yield AllToAll(torch.stack([self.encode(part, draw) for part in parts]))
        mine = self.added(list(arrived), parts[0], draw)
        sums = yield Gather(self.encode(mine, draw))
        return torch.cat([self.decode(each, size, value.dtype, draw) for each in sums])[: len(value)]


def _exponent(x: torch.Tensor) -> int:
    import torch

    if len(x) == 0:
        return 0
    largest = max(abs(float(end)) for end in torch.aminmax(x))
    if not math.isfinite(largest) or largest == 0:
        return 0
    # Neither the factor nor its inverse may overflow in the tensor's own type.
    limit = 126 if x.dtype == torch.float32 else 1022
    return max(-limit, min(limit, LARGEST_EXPONENT - math.frexp(largest)[1]))
