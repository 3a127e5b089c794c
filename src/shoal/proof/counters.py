"""Numbers by which a model counts its calls: integers, in buffers or attributes, that a forward raises by one.

A model may change its ways at some count (a schedule in its forward). What is tried before training sets counters
forward, so that this shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LATER = (2, 5, 20, 100, 1000, 10_000, 100_000, 1_000_000)
"""What counters are set to."""


def numbers(model: nn.Module) -> dict[str, int]:
    """Integers that modules hold, by name; batch norm's own count of batches aside."""
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() == 1 and not buffer.is_meta and _counts(buffer):
                found[f"{prefix}{name}"] = int(buffer)
        found |= {f"{prefix}{name}": int(value) for name, value in _attributes(module).items() if _is_whole(value)}
    return found


def counters(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The names of those that grew by one."""
    return [name for name, value in after.items() if value == before.get(name, 0) + 1]


def set_counter(model: nn.Module, name: str, value: int) -> None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own in module._buffers:
        module._buffers[own] = torch.full_like(module._buffers[own], value)  # type: ignore[arg-type]
    else:
        setattr(module, own, type(getattr(module, own))(value))


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _counts(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isfinite().all()) and float(buffer).is_integer()
    return not buffer.is_complex() and buffer.dtype is not torch.bool


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}
