"""Whether numbers are numbers: what overflowed on one rank has to be seen by all."""

from __future__ import annotations

import torch


def is_finite(x: torch.Tensor) -> torch.Tensor:
    """Whether no element is inf or NaN, as a tensor without dimensions: the host need not wait for it."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(x)
    return torch.isfinite(low) & torch.isfinite(high)


def or_nan(x: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """The same, or all NaN if it is not finite: so whatever a method picks to send, the others see it. In host memory
    the host decides and saves a pass; on an accelerator it does not wait for the answer."""
    if x.device.type == "cpu":
        return x if finite else torch.full_like(x, float("nan"))
    return torch.where(finite, x, float("nan"))
