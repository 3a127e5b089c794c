"""Compiled models in checks: which parts of a model torch.compile has wrapped, and how to run them uncompiled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def compiled_parts(model: nn.Module) -> str:
    """The first compiled module of a model, in words; empty if there is none."""
    for path, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            return path or "all of it"
    return ""


def running_eagerly() -> AbstractContextManager[Any]:
    """While active, compiled code runs as it is written: a check is about numbers, and compiling takes minutes."""
    return torch.compiler.set_stance("force_eager")
