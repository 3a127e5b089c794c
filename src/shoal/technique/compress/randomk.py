"""Random-k: elements at places that all ranks draw alike, so places need not be sent and values add.

One place is drawn in each of k equal strata, and all are rotated by a random distance: every element is sent with
the same probability k/n, no place twice, at the cost of k draws. The choice of neighbours is not independent, which
error feedback does not ask for: E|x - sent|^2 = (1 - k/n)|x|^2, as with independent draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import kept_count
from shoal.strategy.terms.arguments import real
from shoal.strategy.terms.compress import Transfer
from shoal.strategy.terms.numerals import percent

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw


class randomk(Compressor):
    """Elements at random, a fraction r of them, the same on all replicas."""

    r: float = real(0.0, 1.0, sample=0.05)

    title = "random-k"
    sends = "rn s: all ranks draw the same indices, which are not sent"
    adds = True
    within = 0.3
    passes = (39, 0)

    def words(self) -> str:
        return (
            f"{percent(self.r)} of the elements, drawn alike on all replicas, are sent; the rest waits for "
            "the next step"
        )

    def transfers(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        return [Transfer("all_reduce", kept_count(self.r, prod(shape)) * itemsize)]

    def pushed_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return kept_count(self.r, num_elements) * itemsize

    def ring_bytes(self, elements: Any, sides: Any, *, ranks: Any, itemsize: int) -> tuple[Any, float] | None:
        return self.r * elements * itemsize, 2.0

    def places(self, num_elements: int, draw: Draw, device: torch.device | str = "cpu") -> torch.Tensor:
        import torch

        count = kept_count(self.r, num_elements)
        bounds = torch.arange(count + 1, device=device).mul_(num_elements).floor_divide_(count)
        # 32 random bits times the size of a stratum: the upper half is a place in it.
        within = draw.alike(count, device).mul_(bounds.diff()).bitwise_right_shift_(32)
        return within.add_(bounds[:-1]).add_(draw.number(num_elements)).remainder_(num_elements)

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The values at the places drawn, nothing else."""
        return x.index_select(0, self.places(len(x), draw, x.device))

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        dense = payload.new_zeros(num_elements, dtype=dtype)
        self.add(payload, dense, draw)
        return dense

    def add(self, payload: torch.Tensor, into: torch.Tensor, draw: Draw, *, alpha: int = 1) -> None:
        into.index_add_(0, self.places(len(into), draw, into.device), payload, alpha=alpha)
