"""The optimisers of the fuzzer: PyTorch's, and five written by hand that break what engines like to assume."""

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


class Orthogonal(torch.optim.Optimizer):
    """Momentum; the update of a matrix is made nearly orthogonal, and that of anything else is scaled by its norm."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(0.9).add_(param.grad)
                update = momentum / (momentum.norm() + 1e-2)
                if param.dim() >= 2:
                    rows = update.flatten(1)
                    for _ in range(3):
                        rows = 1.5 * rows - 0.5 * rows @ rows.T @ rows
                    update = rows.view_as(param)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


class Preconditioned(torch.optim.Optimizer):
    """A matrix of the rows of each parameter, summed over the steps, divides its gradient."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                rows = param.grad.reshape(param.shape[0] if param.dim() else 1, -1)
                state = self.state[param]
                if "rows" not in state:
                    state["rows"] = torch.eye(len(rows), dtype=param.dtype)
                state["rows"].add_(rows @ rows.T)
                update = torch.linalg.solve(state["rows"], rows).view_as(param)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


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
        case "orthogonal":
            return Orthogonal(groups)
        case "preconditioned":
            return Preconditioned(groups)
    return getattr(optim, name)(groups, lr=0.01)


def lr_factor(name: str, step: int) -> float:
    if name == "warm-up":
        return min(1.0, (step + 1) / 4)
    return 0.8**step if name == "decay" else 1.0
