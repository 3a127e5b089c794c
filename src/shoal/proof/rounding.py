"""How a serial run rounds differently, which shows how far rounding alone moves its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Disturbed:
    """Another rounding of the same numbers: each step, parameters move by less than their last digit, and the samples
    of a batch are summed in reverse (unless their order means something)."""

    seed: int
    reverse: bool = True


def move_by_rounding(params: Iterable[torch.Tensor], noise: torch.Generator) -> None:
    """Moves every element by less than its last digit."""
    with torch.no_grad():
        for param in params:
            real = torch.view_as_real(param) if param.is_complex() else param
            unit = torch.finfo(real.dtype).eps
            real.mul_(1 + unit * (2 * torch.rand(real.shape, generator=noise, dtype=real.dtype) - 1))
