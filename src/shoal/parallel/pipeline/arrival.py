"""A tensor that a stage has received, as the stage's forward sees it: the result of an operation like any other.

A leaf of autograd may not be written in place, and blocks do that (`nn.ReLU(inplace=True)` as the first layer). So what
arrives enters the graph by an operation that copies nothing, and whose backward keeps the gradient.
"""

from __future__ import annotations

from typing import Any

import torch


class Arrival:
    """One tensor that crossed a border, and its gradient once backward has been there."""

    def __init__(self, tensor: torch.Tensor, *, learns: bool) -> None:
        self._values, self.learns = tensor, learns
        self.gradient: torch.Tensor | None = None

    def enter(self) -> torch.Tensor:
        """The tensor, for one forward."""
        if not (self.learns and torch.is_grad_enabled()):
            return self._values.detach()
        anchor = torch.empty(0, device=self._values.device, requires_grad=True)
        entered: torch.Tensor = _Enter.apply(anchor, self)
        return entered

    def gradient_or_zeros(self) -> torch.Tensor:
        return self.gradient if self.gradient is not None else torch.zeros_like(self._values)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        return arrival._values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        seen = ctx.arrival.gradient
        ctx.arrival.gradient = gradient if seen is None else seen + gradient
        return None, None
