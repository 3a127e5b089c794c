"""Optimisers of every kind: PyTorch's own, and some written as they are found in the wild, each with state that is kept
in another place or with steps that look at more than an element."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.job import LAMB, LARS, MuonWithAdamW

O = torch.optim


class Written(O.Optimizer):
    """`update(param, group, state)` for each parameter with a gradient."""

    def __init__(self, groups: Any, **defaults: Any) -> None:
        super().__init__(groups, {"lr": 0.05, **defaults})

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Before the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group, self.state[param])


class ScheduleFree(Written):
    """Schedule-free SGD: averages in groups, z for each parameter."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, k=0, weight_sum=0.0, lr_max=-1.0)

    def begin(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["lr_max"] = max(group["lr"], group["lr_max"])
            weight = group["k"] ** 0.5 * group["lr_max"]
            group["weight_sum"] += weight
            group["share"] = weight / group["weight_sum"]

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        z = state.setdefault("z", param.clone())
        param.lerp_(z, group["share"]).sub_(0.1 * group["lr"] * param.grad)
        z.sub_(group["lr"] * param.grad)


class Prodigy(Written):
    """A distance d, learned from all parameters together, in every group."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, d=1e-2, numerator=0.0)

    def begin(self) -> None:
        d, numerator, size = self.param_groups[0]["d"], self.param_groups[0]["numerator"], 0.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    start = self.state[param].setdefault("p0", param.clone())
                    numerator += float(d * (param.grad * (start - param)).sum())
                    size += float(d * param.grad.abs().sum())
        for group in self.param_groups:
            group["numerator"] = numerator
            group["d"] = max(d, abs(numerator) / (size + 1e-12) + 1.01 * d * 0.01 + d)

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["d"] * group["lr"] * param.grad)


class Madgrad(Written):
    """A counter under a key of its own in the state."""

    def begin(self) -> None:
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0], dtype=torch.long)
        self.state["k"] += 1

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = state.setdefault("s", torch.zeros_like(param))
        total.add_(param.grad, alpha=group["lr"] * float(self.state["k"]) ** 0.5)
        param.sub_(0.3 * total / float(self.state["k"]))


class Apex(Written):
    """Counts steps in the group, as apex and timm do."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("m", torch.zeros_like(param))
        mean.lerp_(param.grad, 0.1)
        param.sub_(group["lr"] * mean / (1 - 0.9 ** group["step"]))


class Counted(Written):
    """Counts in an attribute, only in steps in which something has a gradient."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.calls = 0
        self.history: list[float] = []

    def begin(self) -> None:
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            self.calls += 1
            self.history = [*self.history[-2:], 1.0 / self.calls]

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * sum(self.history) * param.grad)


class Mixed(Written):
    """State that is text, a bool, None and a tuple."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(phase="first", warm=False, nothing=None, pair=(0, 0.5))
        factor = state["pair"][1] if state["warm"] else 1.0
        param.sub_(group["lr"] * factor * param.grad)
        state.update(phase="later", warm=True, pair=(state["pair"][0] + 1, state["pair"][1] * 0.9))


class Listed(Written):
    """Momentum in a list that runs parallel to the parameters."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.momentum = [torch.zeros_like(param) for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for (param, group), momentum in zip(params, self.momentum, strict=True):
            if param.grad is not None:
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(group["lr"] * momentum)


class Lookahead(O.Optimizer):
    """Wraps another optimiser, whose state is its own, and keeps slow weights."""

    def __init__(self, groups: Any) -> None:
        self.inner = O.SGD(groups, lr=0.05, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self.turn = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("slow", param.clone())
        self.inner.step()
        self.turn += 1
        if self.turn % 2 == 0:
            for group in self.param_groups:
                for param in group["params"]:
                    slow = self.state[param]["slow"].lerp_(param, 0.5)
                    param.copy_(slow)


class SelfPaced(Written):
    """Lowers its own learning rate."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.9

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad)


class Lamb(Written):
    """Steps by the norm of each parameter, and counts in the group."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("m", torch.zeros_like(param)).lerp_(param.grad, 0.2)
        param.sub_(group["lr"] * mean / (1 - 0.8 ** group["step"]) * (param.norm() / (mean.norm() + 1e-6)))


class Transposed(Written):
    """State of the transposed shape, and of one row."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        gradient = param.grad.reshape(param.shape[0] if param.dim() else 1, -1)
        turned = state.setdefault("turned", torch.zeros_like(gradient.T)).lerp_(gradient.T, 0.5)
        rows = state.setdefault("rows", torch.zeros(gradient.shape[0], dtype=param.dtype))
        rows.add_(gradient.square().sum(1))
        param.sub_(group["lr"] * (turned.T / (1 + rows[:, None])).reshape(param.shape))


class Centralised(Written):
    """Subtracts the mean of the gradient, of matrices only."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        gradient = param.grad - param.grad.mean() if param.dim() > 1 else param.grad
        param.sub_(group["lr"] * gradient)


class ByDimensions(Written):
    """Decays matrices only."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if param.dim() > 1:
            param.mul_(1 - group["lr"] * 0.5)
        param.sub_(group["lr"] * param.grad)


class BySize(Written):
    """Treats small tensors otherwise."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (0.5 if param.numel() < 20 else 1.0) * param.grad)


class GlobalNorm(Written):
    """Divides by the norm over all parameters."""

    def begin(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = float(sum(float(g.square().sum()) for g in gradients) ** 0.5)

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(group["lr"] * param.grad / (self.norm + 1e-6))


class FirstFrozen(Written):
    """Leaves the first parameter of the first group alone."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if param is not self.param_groups[0]["params"][0]:
            param.sub_(group["lr"] * param.grad)


class WithoutRate(O.Optimizer):
    """Has no learning rate."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"speed": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["speed"] * param.grad)


class Averaging(O.AdamW):
    """Keeps a moving average of the weights in the state of its parent."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.02)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("average", param.clone()).lerp_(param, 0.1)
                param.lerp_(self.state[param]["average"], 0.05)


class Lazy(Written):
    """Starts its state in its second step, and changes its ways in every other one."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        if state["t"] >= 2:
            mean = state.setdefault("m", torch.zeros(param.shape, dtype=param.dtype)).lerp_(param.grad, 0.3)
            param.sub_(group["lr"] * (mean if state["t"] % 2 else param.grad))
        else:
            param.sub_(0.5 * group["lr"] * param.grad)


class Nested(Written):
    """Numbers in nested dicts and lists, in the state, in groups and in an attribute; a tensor on the optimiser."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, inner={"rows": [1.0], "n": 0})
        self.scale = torch.ones(3, dtype=torch.float64)
        self.table: dict[str, Any] = {"a": {"b": [0]}}

    def begin(self) -> None:
        self.scale.mul_(0.9)
        self.table["a"]["b"][0] += 1
        for group in self.param_groups:
            n = group["inner"]["n"] + 1
            group["inner"] = {"rows": [*group["inner"]["rows"], 1.0 / n], "n": n}

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        kept = state.setdefault("kept", {"n": 0, "rows": []})
        kept["n"] += 1
        kept["rows"].append(1.0 / kept["n"])
        factor = sum(kept["rows"]) * float(self.scale.sum()) * group["inner"]["rows"][-1] / self.table["a"]["b"][0]
        param.sub_(group["lr"] * factor * param.grad)


class NestedTensors(Written):
    """Tensors of the parameter's shape inside a list of its state."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        means = state.setdefault("means", [torch.zeros_like(param), {"second": torch.zeros_like(param)}])
        means[0].lerp_(param.grad, 0.2)
        means[1]["second"].lerp_(param.grad.square(), 0.2)
        param.sub_(group["lr"] * means[0] / (means[1]["second"].sqrt() + 1e-3))


class Shampoo(Written):
    """Statistics for each dimension, and roots of them in every second step."""

    def update(self, param: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        gradient = param.grad
        if param.dim() == 0:
            param.sub_(group["lr"] * gradient)
            return
        for dim, size in enumerate(param.shape):
            rows = gradient.movedim(dim, 0).reshape(size, -1)
            start = 0.1 * torch.eye(size, dtype=param.dtype)
            statistics = state.setdefault(f"s{dim}", start.clone()).add_(rows @ rows.T)
            if state["t"] % 2:
                values, vectors = torch.linalg.eigh(statistics)
                state[f"p{dim}"] = vectors @ (values ** (-0.5 / param.dim())).diag() @ vectors.T
            gradient = torch.tensordot(state[f"p{dim}"], gradient.movedim(dim, 0), 1).movedim(0, dim)
        param.sub_(group["lr"] * gradient)


class Hybrid(O.Optimizer):
    """Two optimisers in one: factored for matrices, AdamW for the rest."""

    def __init__(self, groups: Any) -> None:
        groups = [dict(group) for group in groups]
        super().__init__(groups, {"lr": 0.02})
        every = [(param, group["lr"]) for group in self.param_groups for param in group["params"]]
        self.matrices = O.Muon([{"params": [p], "lr": lr} for p, lr in every if p.dim() == 2])
        self.rest = O.AdamW([{"params": [p], "lr": lr} for p, lr in every if p.dim() != 2])
        self.n = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.n += 1
        for inner in (self.matrices, self.rest):
            for group in inner.param_groups:
                group["lr"] = 0.02 / self.n
            inner.step()


class Sharpness(Written):
    """SAM: climbs, computes the gradient there, and steps from where it was."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        closure()
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        used = [(param, group) for param, group in params if param.grad is not None]
        norm = float(sum(float(param.grad.square().sum()) for param, _ in used) ** 0.5)
        before = [param.clone() for param, _ in used]
        for param, _ in used:
            param.add_(param.grad, alpha=0.05 / (norm + 1e-12))
        closure()
        for (param, group), value in zip(used, before, strict=True):
            param.copy_(value)
            if param.grad is not None:
                momentum = self.state[param].setdefault("m", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                param.sub_(group["lr"] * momentum)


class Ascending(Written):
    """By the place in its group: the later, the slower."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    param.sub_(group["lr"] / (1 + place) * param.grad)


def muon(groups: list[dict[str, Any]]) -> O.Optimizer:
    """Muon for matrices, AdamW for the rest."""
    found = []
    for group in groups:
        for matrices in (True, False):
            params = [param for param in group["params"] if (param.dim() == 2) is matrices]
            if params:
                found.append({**group, "params": params, "muon": matrices})
    return MuonWithAdamW(found, lr=0.02)


Factory = Callable[[list[dict[str, Any]]], O.Optimizer]

ELEMENTWISE: dict[str, Factory] = {
    "SGD": partial(O.SGD, lr=0.1),
    "SGD-nesterov": partial(O.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD-dampened": partial(O.SGD, lr=0.1, momentum=0.9, dampening=0.2),
    "Adam": partial(O.Adam, lr=0.02, amsgrad=True),
    "AdamW": partial(O.AdamW, lr=0.02),
    "AdamW-foreach": partial(O.AdamW, lr=0.02, foreach=True),
    "AdamW-tensor": lambda groups: O.AdamW(groups, lr=torch.tensor(0.02, dtype=torch.float64)),
    "NAdam": partial(O.NAdam, lr=0.02),
    "RAdam": partial(O.RAdam, lr=0.02),
    "Adamax": partial(O.Adamax, lr=0.02),
    "Adagrad": partial(O.Adagrad, lr=0.1),
    "Adadelta": partial(O.Adadelta, lr=1.0),
    "RMSprop": partial(O.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Rprop": partial(O.Rprop, lr=0.01),
    "ASGD": partial(O.ASGD, lr=0.05, t0=1),
    "ScheduleFree": ScheduleFree,
    "Madgrad": Madgrad,
    "Apex": Apex,
    "Counted": Counted,
    "Mixed": Mixed,
    "Lookahead": Lookahead,
    "SelfPaced": SelfPaced,
    "WithoutRate": WithoutRate,
    "Averaging": Averaging,
    "Lazy": Lazy,
    "Nested": Nested,
    "Adagrad-start": partial(O.Adagrad, lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1, maximize=True),
    "AdamW-fused": partial(O.AdamW, lr=0.02, fused=True, amsgrad=True),
    "SGD-maximize": partial(O.SGD, lr=0.01, momentum=0.5, maximize=True, foreach=True),
    "Rprop-foreach": partial(O.Rprop, lr=0.01, etas=(0.4, 1.3), foreach=True),
    "NAdam-decoupled": partial(O.NAdam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "AdamW-betas": lambda groups: O.AdamW(groups, lr=0.02, betas=(torch.tensor(0.8), torch.tensor(0.95))),
}

PARAMETERWISE: dict[str, Factory] = {
    "Adafactor": partial(O.Adafactor, lr=0.05),
    "Lamb": Lamb,
    "Transposed": Transposed,
    "Centralised": Centralised,
    "ByDimensions": ByDimensions,
    "BySize": BySize,
    "NestedTensors": NestedTensors,
    "Shampoo": Shampoo,
    "Muon": muon,
    "LARS": partial(LARS, lr=0.5, momentum=0.9, weight_decay=0.01),
    "LAMB": partial(LAMB, lr=0.02, weight_decay=0.01),
}

COUPLED: dict[str, Factory] = {
    "LBFGS": partial(O.LBFGS, lr=0.5, max_iter=3, history_size=4),
    "Prodigy": Prodigy,
    "GlobalNorm": GlobalNorm,
    "FirstFrozen": FirstFrozen,
    "Listed": Listed,
    "Sharpness": Sharpness,
    "Ascending": Ascending,
    "Hybrid": Hybrid,
}

EVERY = {**ELEMENTWISE, **PARAMETERWISE, **COUPLED}
ONE_GROUP = ("LBFGS", "Rprop", "Adagrad-none", "Lookahead")
"""Those that take no groups of different options, or none with weight decay."""


class Net(nn.Module):
    """Shapes of none to three dimensions, sizes that divide by nothing, and a branch that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.branch = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.cube = nn.Parameter(torch.randn(2, 3, 7) * 0.3)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.head = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        used = x[:, :1] > 1.0
        if used.any():
            h = h + used * self.branch(x)
        return self.head(torch.tanh(h * self.scale + self.cube.sum((0, 1))))
