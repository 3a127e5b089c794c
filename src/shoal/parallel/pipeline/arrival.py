"""A tensor that a stage has received, as the stage's forward sees it: the result of an operation like any other.

A leaf of autograd may not be written in place, and blocks do that (`nn.ReLU(inplace=True)` as the first layer). So what
arrives enters the graph by an operation that copies nothing, and whose backward keeps the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import swap_tensors


class Branched(RuntimeError):
    """A micro-batch takes another way through the model than the one that was cut into stages."""

    for_user = True


class Arrival:
    """One tensor that crossed a border, and its gradient once backward has been there."""

    def __init__(self, tensor: torch.Tensor, *, learns: bool) -> None:
        self._values, self.learns = tensor, learns
        self.gradient: torch.Tensor | None = None

    def enter(self, *, expected: bool = True) -> torch.Tensor:
        """The tensor, for one forward. `expected`: whether a gradient comes to it, as far as the trace knows."""
        if not ((self.learns or not expected) and torch.is_grad_enabled()):
            return self._values.detach()
        anchor = torch.empty(0, device=self._values.device, requires_grad=True)
        entered: torch.Tensor = _Enter.apply(anchor, self, expected)
        return entered

    def gradient_or_zeros(self) -> torch.Tensor:
        return self.gradient if self.gradient is not None else torch.zeros_like(self._values)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, arrival: Arrival, expected: bool) -> torch.Tensor:
        ctx.arrival, ctx.expected = arrival, expected
        return arrival._values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not ctx.expected:
            raise Branched(
                "a gradient comes to a tensor at a stage boundary to which none came when the model was cut into "
                "stages: the model or its loss branches on its data, which stages on other ranks cannot follow; leave "
                "pp out"
            )
        seen = ctx.arrival.gradient
        ctx.arrival.gradient = gradient if seen is None else seen + gradient
        return None, None, None


def become(placeholder: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Makes one tensor the other, wherever code holds it; False where something else holds its memory as well."""
    try:
        swap_tensors(placeholder, tensor)
    except RuntimeError:
        return False
    return True
