"""The learning rates of an optimiser's groups, and the schedule's factor in them."""

from __future__ import annotations

import copy
from typing import Any

import torch


class LearningRates:
    """Those the optimiser was built with, times the factor of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"] = group["lr"].detach().clone()  # The schedule writes to it: not to the user's own.
        self.base = [copy.deepcopy(group.get("lr")) for group in optimizer.param_groups]
        self.factor = 1.0

    def apply(self, factor: float) -> None:
        """Writes learning rates only when the factor changes: between, they are the optimiser's and its schedulers'."""
        if factor == self.factor:
            return
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            if base is None:
                raise ValueError(
                    f"{type(self.optimizer).__name__} has no learning rate ('lr') in its groups, so a schedule cannot "
                    "change it; leave Job.schedule out, or name the optimiser's learning rate 'lr'"
                )
            if isinstance(base, torch.Tensor):
                group["lr"].copy_(base * factor)
            else:
                group["lr"] = base * factor
        self.factor = factor

    def wanted(self, group: int) -> Any:
        """What the schedule has made of a group's rate, as long as no one else has changed it."""
        base = self.base[group]
        if base is None or self.factor == 1.0:
            return base
        return (base * self.factor).to(base.dtype) if isinstance(base, torch.Tensor) else base * self.factor

    def now(self, factor: float) -> float | None:
        """The absolute learning rate of a step with this factor, of the first group that has one. Where a scheduler of
        the caller's own sets rates, what it has set."""
        for place, group in enumerate(self.optimizer.param_groups):
            if group.get("lr") is not None:
                rate = group["lr"] if factor == self.factor else self.base[place] * factor
                return float(rate)
        return None
