"""Optimisers that look at a full parameter at a time: LARS and LAMB for large batches, and Muon with AdamW.

Each scales or turns the update of one parameter by that parameter's own values, gradient and state. They train under
any strategy: where ranks hold pieces of a parameter, one of them updates it (`parallel/full_parameters.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates for SGD with momentum (You, Gitman & Ginsburg 2017).

        ratio = trust |w| / (|g| + weight_decay |w|)        1 where either norm is zero, and for vectors
        v = momentum v + lr ratio (g + weight_decay w)
        w = w - v

    Vectors (biases, norms) are updated by plain SGD with momentum, as the paper's authors and Goyal et al. do.

    Args:
        groups: Parameters, or groups of them.
        lr: Learning rate.
        momentum: Of the velocity.
        weight_decay: Added to the gradient, as a fraction of the value. Give vectors 0 with `Job.options`.
        trust: The paper's eta: the length of a step relative to that of the parameter, at a rate of 1.
    """

    def __init__(
        self, groups: Any, lr: float = 0.1, *, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 0.001
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            decay = group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                ratio = 1.0
                if param.dim() > 1:
                    size, slope = _norm(param), _norm(param.grad)
                    if size and slope:
                        ratio = group["trust"] * size / (slope + decay * size)
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                velocity = state["momentum_buffer"].mul_(group["momentum"])
                velocity.add_(param.grad.add(param, alpha=decay), alpha=group["lr"] * ratio)
                param.sub_(velocity)


class LAMB(torch.optim.Optimizer):
    """Adam with layer-wise rates (You et al. 2020, algorithm 2).

        m, v        Adam's moments, corrected for their start
        u = m / (sqrt(v) + eps) + weight_decay w
        w = w - lr |w| / |u| u                              the ratio is 1 where either norm is zero

    Args:
        groups: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled, inside of the norm. Give vectors 0 with `Job.options`.
    """

    def __init__(
        self,
        groups: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                state["step"] += 1
                mean = state["exp_avg"].lerp_(param.grad, 1 - first) / (1 - first ** state["step"])
                square = state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                update = mean / ((square / (1 - second ** state["step"])).sqrt() + group["eps"])
                update.add_(param, alpha=group["weight_decay"])
                size, length = _norm(param), _norm(update)
                param.sub_(update, alpha=group["lr"] * (size / length if size and length else 1.0))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups with `muon=True`, AdamW for all others, in one optimiser.

    Muon (Jordan et al. 2024) makes the momentum of a matrix orthogonal, by five Newton-Schulz products. It is meant for
    the matrices of hidden layers; embeddings, heads, biases and norms take AdamW.

    Args:
        groups: Groups of parameters; options of either optimiser may be set on them.
        lr: Learning rate of AdamW, and of Muon.
        muon: Options of torch.optim.Muon.
        adamw: Options of torch.optim.AdamW.

    Example:
        >>> import torch
        >>> from shoal.job import MuonWithAdamW
        >>> groups = [{"params": [torch.nn.Parameter(torch.ones(2, 2))], "muon": True, "lr": 0.02},
        ...           {"params": [torch.nn.Parameter(torch.ones(2))]}]
        >>> [type(inner).__name__ for inner in MuonWithAdamW(groups, lr=3e-4).inner]
        ['Muon', 'AdamW']
    """

    def __init__(
        self, groups: Any, lr: float = 1e-3, *, muon: dict[str, Any] | None = None, adamw: dict[str, Any] | None = None
    ) -> None:
        super().__init__(groups, {"lr": lr, "muon": False})
        matrices = [group for group in self.param_groups if group["muon"]]
        rest = [group for group in self.param_groups if not group["muon"]]
        # The groups are the same objects, so that a schedule of this optimiser's rates reaches the inner ones.
        self.inner: list[torch.optim.Optimizer] = []
        if matrices:
            self.inner.append(torch.optim.Muon(matrices, lr=lr, **(muon or {})))
        if rest:
            self.inner.append(torch.optim.AdamW(rest, lr=lr, **(adamw or {})))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))
