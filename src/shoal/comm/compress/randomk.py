"""Random-k: elements at places that all ranks draw alike, so places need not be sent and values add.

One place is drawn in each of k equal strata, and the whole is rotated by a random distance: every element is sent with
the same probability k/n, no place twice, at the cost of k draws. The choice of neighbours is not independent, which
error feedback does not ask for: E|x - sent|^2 = (1 - k/n)|x|^2, as with independent draws.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.codec import Codec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.traffic import kept_count


class RandomK(Codec):
    """The values at the places drawn, nothing else."""

    adds = True

    def __init__(self, *, fraction: float) -> None:
        self.fraction = fraction

    def places(self, num_elements: int, draw: Draw, device: torch.device | str = "cpu") -> torch.Tensor:
        count = kept_count(self.fraction, num_elements)
        bounds = torch.arange(count + 1, device=device).mul_(num_elements).floor_divide_(count)
        # 32 random bits times the size of a stratum: the upper half is a place in it.
        within = draw.alike(count, device).mul_(bounds.diff()).bitwise_right_shift_(32)
        return within.add_(bounds[:-1]).add_(draw.number(num_elements)).remainder_(num_elements)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        return x.index_select(0, self.places(len(x), draw, x.device))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        dense = torch.zeros(num_elements, dtype=dtype, device=payload.device)
        self.add(payload, dense, draw)
        return dense

    def add(self, payload: torch.Tensor, into: torch.Tensor, draw: Draw, *, alpha: int = 1) -> None:
        into.index_add_(0, self.places(len(into), draw, into.device), payload, alpha=alpha)
