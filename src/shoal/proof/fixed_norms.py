"""A model whose samples can be compared one by one: float64, nothing dropped, batch norm by fixed statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shoal.proof.undropped import without_dropout
from shoal.runtime.float64 import model_in_float64

START = 0.02
"""Standard deviation of what parameters that start at zero are set to: behind a zero nothing could be seen."""


class FixedStatistics(TorchFunctionMode):
    """Batch norm that modules call as a function: engines synchronise it too, so it is left out like the modules."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        if given.get("training"):
            self.asked = True
            channels = given["input"].size(1)
            given["running_mean"] = given["input"].new_zeros(channels)
            given["running_var"] = given["input"].new_ones(channels)
            given["training"] = False
        return func(**given)


def prepared(model: nn.Module) -> nn.Module:
    """In float64, without dropout, in training mode but for batch norm, and with nothing hidden behind zeros."""
    model = without_dropout(model_in_float64(model)).train()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            if param.numel() and not param.any():
                param.add_(START * torch.randn(param.shape, generator=generator, dtype=param.dtype))
    fix_norms(model)
    return model


def fix_norms(model: nn.Module) -> None:
    """Batch norm modules use their running statistics from now on, or fixed ones where they keep none."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.running_mean is None:
                like = next(
                    (t for t in (module.weight, module.bias) if t is not None), torch.zeros((), dtype=torch.float64)
                )
                module.running_mean = like.new_zeros(module.num_features)
                module.running_var = like.new_ones(module.num_features)
            module.eval()
