"""Hooks that a job puts on its parameters' gradients (`register_hook`, `register_post_accumulate_grad_hook`).

PyTorch loses them whenever a parameter is copied or replaced, without a word; what copies a model keeps them by the
functions here. A hook sees what a rank computes: part of a sum. So only hooks that are linear train the same model on
several ranks; whether they are is found out by `proof/coupling.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def hooks_of(param: torch.Tensor) -> list[Callable[..., Any]]:
    """The job's own hooks on a parameter's gradient."""
    return [hook for _, hook in _hooks(param)]


def keep_hooks(of: torch.Tensor, on: torch.Tensor) -> None:
    """Puts the job's hooks of one parameter on another that takes its place."""
    if on.requires_grad:
        for method, hook in _hooks(of):
            getattr(on, method)(hook)


def copied(model: AnyModule, known: dict[int, Any] | None = None) -> AnyModule:
    """A deep copy of a model, hooks on its parameters included."""
    other = copy.deepcopy(model, known)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        keep_hooks(one, two)
    return other


def _hooks(param: torch.Tensor) -> Iterator[tuple[str, Callable[..., Any]]]:
    for kept, method in (
        ("_backward_hooks", "register_hook"),
        ("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
    ):
        for hook in (getattr(param, kept, None) or {}).values():
            if not (getattr(hook, "__module__", None) or "").startswith("shoal."):
                yield method, hook
