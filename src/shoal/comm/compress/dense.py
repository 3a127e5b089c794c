"""No compression: the all-reduce that the others are measured against."""

from __future__ import annotations

import torch

from shoal.comm.compress.exchange import Sum
from shoal.comm.compress.given import Draw, Over, State
from shoal.comm.compress.method import Method, Total


class Dense(Method):
    """Gradients as they are."""

    def _total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        return (yield Sum(value))
