"""Which optimiser options each parameter gets, and the resulting parameter groups. Options belong to a
parameter's name, not to its place in a group, so that every strategy can rebuild the same groups from the
parameters it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Options = Callable[[str, Tensor], dict[str, Any]]


def no_options(name: str, parameter: Tensor) -> dict[str, Any]:
    """Every parameter takes the optimiser's own defaults."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayMatrices:
    """Weight decay on parameters of two or more dimensions only; biases and norms are not decayed."""

    weight_decay: float

    def __call__(self, name: str, parameter: Tensor) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay if parameter.dim() >= 2 else 0.0}


def param_groups(model: nn.Module, options: Options = no_options) -> list[dict[str, Any]]:
    """The optimiser's parameter groups: trainable parameters, each once, joined where their options are
    equal.

    Groups stand in the order in which their first parameter appears in `named_parameters`, and so do the
    parameters in them.
    """
    groups: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        wanted = dict(options(name, parameter))
        if wanted in found:
            groups[found.index(wanted)]["params"].append(parameter)
        else:
            found.append(wanted)
            groups.append({"params": [parameter], **wanted})
    return groups
