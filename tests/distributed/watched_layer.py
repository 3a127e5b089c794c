"""A layer that notes the weights which its forward and its backward are given, in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SEEN: list[tuple[str, str, float]] = []
"""(forward or backward, which layer, a sum that stands for its weight) as they happen."""


def mark(tensor: Tensor) -> float:
    """A number that differs for tensors that differ."""
    flat = tensor.detach().reshape(-1).double()
    return float((flat * torch.arange(1, flat.numel() + 1)).sum())


class WatchedProduct(torch.autograd.Function):
    """x @ w.T"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name = name
        SEEN.append(("forward", name, mark(weight)))
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        SEEN.append(("backward", ctx.name, mark(weight)))
        return gradient @ weight, gradient.t() @ x, None


class WatchedLayer(nn.Module):
    """A block around such a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        # Its start tells it from its like, whatever copies are made of the model.
        self.name = f"{mark(self.weight):.9f}"

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(WatchedProduct.apply(x, self.weight, self.name))
