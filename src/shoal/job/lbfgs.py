"""Distributed L-BFGS (the Sandblaster of Dean et al. 2012): every vector of the method lies in the pieces in which
ranks hold the parameters, and what crosses between ranks is one number for each dot product.

The steps are those of torch.optim.LBFGS without a line search, number for number; the state is one tensor for each
parameter and vector, so that it is sharded, saved and resharded as that of any element-wise optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

CURVED = 1e-10
"""A pair of differences with less curvature than this is left out."""


class ShardedLBFGS(torch.optim.Optimizer):
    """torch.optim.LBFGS on this rank's pieces of the parameters. Under `dp` with any stage of ZeRO.

    Args:
        params: Parameters, or one group of them.
        lr: Length of a step along the direction.
        max_iter: Iterations in a step; each but the last computes the loss of the batch again.
        max_eval: Evaluations of the loss in a step. None: 5/4 of max_iter.
        tolerance_grad: A step ends where no element of the gradient is larger.
        tolerance_change: A step ends where neither parameters nor loss change by more.
        history_size: Pairs of differences that are kept: 2 history_size + 2 numbers for each parameter.
    """

    sums_over_ranks = True

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
    ) -> None:
        most = max_iter * 5 // 4 if max_eval is None else max_eval
        defaults = {
            "lr": lr,
            "max_iter": max_iter,
            "max_eval": most,
            "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change,
            "history_size": history_size,
            "n_iter": 0,
            "ro": [],
            "h_diag": 1.0,
            "length": 0.0,
        }
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError("ShardedLBFGS has one direction for all parameters: give one group, without Job.options")
        self.over_ranks: Callable[[Tensor, str], Tensor] = lambda value, how: value
        """Makes a number of this rank's pieces that of all ranks: (number, "sum" or "max")."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """One step; `closure` computes the loss and the gradients."""
        group = self.param_groups[0]
        closure = torch.enable_grad()(closure)
        first = closure()
        loss, evaluations = float(first), 1
        gradient = self._gradient()
        if self._largest(gradient) <= group["tolerance_grad"]:
            return first
        for number in range(1, group["max_iter"] + 1):
            group["n_iter"] += 1
            direction = self._direction(gradient)
            for param, each, now in zip(self._params, direction, gradient, strict=True):
                self.state[param]["direction"], self.state[param]["last_gradient"] = each, now.clone()
            before, length = loss, group["lr"]
            if group["n_iter"] == 1:
                total = self.over_ranks(_total([each.abs().sum() for each in gradient]), "sum")
                length = min(1.0, 1.0 / float(total)) * group["lr"]
            group["length"] = length
            slope = self._dot(gradient, direction)
            if slope > -group["tolerance_change"]:
                break
            for param, each in zip(self._params, direction, strict=True):
                param.add_(each, alpha=length)
            flat = False
            if number != group["max_iter"]:
                loss = float(closure())
                gradient = self._gradient()
                evaluations += 1
                flat = self._largest(gradient) <= group["tolerance_grad"]
            if number == group["max_iter"] or evaluations >= group["max_eval"] or flat:
                break
            if self._largest(direction) * length <= group["tolerance_change"]:
                break
            if abs(loss - before) < group["tolerance_change"]:
                break
        return first

    def _direction(self, gradient: list[Tensor]) -> list[Tensor]:
        """The two-loop recursion, after the newest pair of differences was kept."""
        group = self.param_groups[0]
        if group["n_iter"] == 1:
            group["ro"], group["h_diag"] = [], 1.0
            return [-each for each in gradient]
        states = [self.state[param] for param in self._params]
        change = [now - state["last_gradient"] for now, state in zip(gradient, states, strict=True)]
        stretch = [state["direction"] * group["length"] for state in states]
        curvature = self._dot(change, stretch)
        if curvature > CURVED:
            kept = len(group["ro"])
            if kept == group["history_size"]:
                for state in states:
                    for number in range(1, kept):
                        state[f"change{number - 1}"], state[f"step{number - 1}"] = (
                            state[f"change{number}"],
                            state[f"step{number}"],
                        )
                group["ro"], kept = group["ro"][1:], kept - 1
            for state, one, other in zip(states, change, stretch, strict=True):
                state[f"change{kept}"], state[f"step{kept}"] = one, other
            group["ro"] = [*group["ro"], 1.0 / curvature]
            group["h_diag"] = curvature / self._dot(change, change)
        found, weights = [-each for each in gradient], {}
        for number in reversed(range(len(group["ro"]))):
            weights[number] = self._dot(self._kept(f"step{number}"), found) * group["ro"][number]
            torch._foreach_add_(found, self._kept(f"change{number}"), alpha=-weights[number])
        torch._foreach_mul_(found, group["h_diag"])
        for number, ro in enumerate(group["ro"]):
            share = self._dot(self._kept(f"change{number}"), found) * ro
            torch._foreach_add_(found, self._kept(f"step{number}"), alpha=weights[number] - share)
        return found

    @property
    def _params(self) -> list[nn.Parameter]:
        return [param for param in self.param_groups[0]["params"] if param.numel()]

    def _gradient(self) -> list[Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone() for p in self._params]

    def _kept(self, key: str) -> list[Tensor]:
        return [self.state[param][key] for param in self._params]

    def _dot(self, one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
        mine = [torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(one, other, strict=True)]
        return float(self.over_ranks(_total(mine), "sum"))

    def _largest(self, tensors: list[Tensor]) -> float:
        mine = [each.abs().max() for each in tensors]
        largest = torch.stack([each.double() for each in mine]).max() if mine else torch.zeros((), dtype=torch.float64)
        return float(self.over_ranks(largest, "max"))


def _total(numbers: list[Tensor]) -> Tensor:
    """Their sum, in double precision: ranks hold different numbers of pieces."""
    if not numbers:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([each.double() for each in numbers]).sum()
