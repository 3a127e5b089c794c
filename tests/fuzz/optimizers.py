"""The optimisers of the fuzzer: PyTorch's, and three written by hand that break what engines like to assume."""

from __future__ import annotations

from typing import Any

import torch

Groups = list[dict[str, Any]]


class Counted(torch.optim.Optimizer):
    """Momentum whose count of steps and running maximum stand in the parameter group, not in the parameters' state."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["m"] = torch.zeros_like(param)
                state["m"].lerp_(param.grad, 1.0 / group["k"])
                param.sub_(state["m"], alpha=group["lr"])


class Lamb(torch.optim.Optimizer):
    """Each parameter's step is scaled by the norms of that parameter."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                update = param.grad + group["weight_decay"] * param
                ratio = (param.norm() + 0.1) / (update.norm() + 0.1)
                param.sub_(update * ratio, alpha=group["lr"])


class Global(torch.optim.Optimizer):
    """All gradients are divided by their common norm: parameters are coupled with each other."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in given]).sum().sqrt() + 1e-3
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / norm, alpha=group["lr"])


def optimizer_of(name: str, groups: Groups) -> torch.optim.Optimizer:
    optim = torch.optim
    match name:
        case "SGD":
            return optim.SGD(groups, lr=0.05)
        case "momentum":
            return optim.SGD(groups, lr=0.05, momentum=0.9)
        case "nesterov":
            return optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
        case "amsgrad":
            return optim.Adam(groups, lr=0.01, amsgrad=True)
        case "tensor-lr":
            return optim.AdamW(groups, lr=torch.tensor(0.01, dtype=torch.float64), foreach=False)
        case "Adafactor":
            return optim.Adafactor(groups, lr=0.01)
        case "counted":
            return Counted(groups)
        case "lamb":
            return Lamb(groups)
        case "global":
            return Global(groups)
    return getattr(optim, name)(groups, lr=0.01)


def lr_factor(name: str, step: int) -> float:
    if name == "warm-up":
        return min(1.0, (step + 1) / 4)
    return 0.8**step if name == "decay" else 1.0
