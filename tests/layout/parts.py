"""A model as one rank would hold it, for tests that add up what ranks compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.layout.tensor.plan import Region
from shoal.layout.tensor.replay import divided
from shoal.layout.tensor.resized import divide_views
from shoal.layout.trace import modules_by_path


def part_of(model: nn.Module, region: Region, ranks: int, index: int) -> nn.Module:
    model = copy.deepcopy(model)
    modules = modules_by_path(model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, cut in region.cuts.items():
        path, _, last = name.rpartition(".")
        part = cut.part(state[name].detach(), ranks, index).clone()
        setattr(modules[path], last, nn.Parameter(part) if isinstance(state[name], nn.Parameter) else part)
    return model


def row_output(model: nn.Module, row: str, run: Callable[[nn.Module], Any]) -> Tensor:
    """What a row gives, without its bias, in the first call."""
    seen: list[Tensor] = []
    module = modules_by_path(model)[row]
    hook = module.register_forward_hook(lambda _module, _args, output: seen.append(output.detach().clone()))
    bias = getattr(module, "bias", None)
    with torch.no_grad():
        if bias is not None:
            bias.zero_()
        run(model)
    hook.remove()
    return seen[0]


def compare(model: nn.Module, region: Region, ranks: int, run: Callable[[nn.Module], Any]) -> None:
    """Asserts that the rows' outputs of all ranks add up to the whole model's."""
    for row in region.rows:
        whole = row_output(copy.deepcopy(model), row, run)
        total = torch.zeros_like(whole)
        for index in range(ranks):
            part = part_of(model, region, ranks, index)
            divide_views(modules_by_path(part), region.views, ranks)
            with divided(modules_by_path(part), region.scaled, ranks):
                total += row_output(part, row, run)
        torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-12)
