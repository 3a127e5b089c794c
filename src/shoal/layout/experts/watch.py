"""Hooks that record calls while a model runs: for each call of a candidate expert its input, its output and the
enclosing modules. They are installed only inside `with`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shoal.layout.experts.rehearsal import random_state


@dataclass(eq=False)
class Frame:
    """One call of an enclosing module: enough to repeat it."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    random: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class MemberCall:
    """One call of a member of a list, or of a module with stacked parameters."""

    number: int
    """Its number among all such calls of the run."""
    member: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: tuple[Frame, ...]
    """The enclosing module calls, outermost first."""
    output: Any = None


def copied(value: Any) -> Any:
    """The same structure with copied tensors: the run may write to the originals."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, value)


def device_of(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))


class ExpertWatch:
    """Records the calls of list members and of stacked modules."""

    def __init__(self, model: nn.Module, *, lists: Mapping[str, tuple[str, ...]], stacks: list[str]) -> None:
        self.model = model
        self.lists = dict(lists)
        self.list_calls: dict[str, list[MemberCall]] = {}
        self.stack_calls: dict[str, MemberCall] = {}
        """The first call of each."""
        self._stacks = {id(model.get_submodule(path)): path for path in stacks}
        self._members: dict[int, list[tuple[str, int]]] = {}
        self._around_lists: set[int] = set()
        for path, keys in lists.items():
            for place, key in enumerate(keys):
                self._members.setdefault(id(model.get_submodule(path)._modules[key]), []).append((path, place))
            parts = path.split(".") if path else []
            self._around_lists |= {id(model.get_submodule(".".join(parts[:n]))) for n in range(len(parts) + 1)}
        self._running: list[Frame] = []
        self._open: list[list[MemberCall]] = []
        self._number = 0
        self._device = device_of(model)
        self._hooks: list[Any] = []

    def __enter__(self) -> ExpertWatch:
        for module in self.model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._begins, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._ends, with_kwargs=True))
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls = []
        for path, place in self._members.get(id(module), ()):
            calls.append(self._note(place, args, kwargs))
            self.list_calls.setdefault(path, []).append(calls[-1])
        stack = self._stacks.get(id(module))
        if stack is not None and stack not in self.stack_calls:
            calls.append(self._note(0, args, kwargs))
            self.stack_calls[stack] = calls[-1]
        frame = Frame(module)
        if id(module) in self._around_lists:
            frame = Frame(module, copied(args), copied(kwargs), random_state(self._device))
        self._running.append(frame)
        self._open.append(calls)

    def _note(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MemberCall:
        self._number += 1
        return MemberCall(self._number, place, copied(args), copied(kwargs), tuple(self._running))

    def _ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._running.pop()
        for call in self._open.pop():
            call.output = copied(output)
