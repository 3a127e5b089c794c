"""Compiled models: which parts of a model torch.compile has wrapped, under which strategies they run, and how checks
run them uncompiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.strategy import Strategy, recompute


class CannotRunCompiled(ValueError):
    """The strategy has to look into code that is compiled."""


def require_uncompiled(model: nn.Module, strategy: Strategy) -> None:
    """Refuses a compiled model under a strategy that acts inside of it."""
    compiled = compiled_parts(model)
    if not compiled:
        return
    names = list(strategy.cutting_axes)
    names += ["zero=3"] * any(level.zero == 3 and level.n > 1 for level in strategy.dp_levels)
    names += ["recompute"] * (strategy.term(recompute) is not None)
    if names:
        text = " and ".join(names)
        raise CannotRunCompiled(
            f"the model is compiled ({compiled}: torch.compile), and {text} must call its modules one by one, which "
            f"compiled code does not; let Job.model return it uncompiled, or leave {text} out"
        )


def compiled_parts(model: nn.Module) -> str:
    """The first compiled module of a model, in words; empty if there is none."""
    for path, module in model.named_modules():
        wrapped = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            return path or "all of it"
    return ""


def running_eagerly() -> Any:
    """A context, or a decorator: while active, compiled code runs as it is written. A check is
    about numbers, and compiling takes minutes."""
    return torch.compiler.set_stance("force_eager")
