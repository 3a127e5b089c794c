"""A forward without side effects: changes to buffers, attributes and random states are discarded.

Some questions about a module can be answered only by running it (which modules it calls, which tokens go where), before
the actual run. For a rehearsal the module gets copies of its buffers and of other tensors that it holds
(`held_state.py`); afterwards everything is restored, so that state changes once, in the actual run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.layout.held_state import found_in, on_copies


def random_state(device: torch.device) -> list[torch.Tensor]:
    """The random state of the CPU, and of the device if it has its own."""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextmanager
def rehearsing(module: nn.Module, *, but: Collection[nn.Module] = ()) -> Iterator[None]:
    """Inside, `module` works on copies of its state. Modules in `but`, and their submodules, are excluded."""
    left_alone = {id(part) for each in but for part in each.modules()}
    with on_copies(found_in(part for part in module.modules() if id(part) not in left_alone)):
        yield


class ParametersKept(TorchDispatchMode):
    """Inside, parameters that a forward writes to (a teacher that follows its student, weights that are clipped) are
    copied before the first write; at the end their values are restored, and new parameters, buffers and modules are
    removed. So is what a forward switches: which parameters learn, which modules are in training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tables = [table for module in model.modules() for table in (module._parameters, module._modules)]
        self._registered = [(table, dict(table)) for table in tables]
        self._buffers = [(module._buffers, set(module._buffers)) for module in model.modules()]
        self._held = [(param, param.data) for param in model.parameters()]
        self._learning = [(param, param.requires_grad) for param in model.parameters()]
        self._training = [(module, module.training) for module in model.modules()]
        self._storages = {data.untyped_storage()._cdata: data for _, data in self._held}
        self._copies: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, name in _written(func):
            for tensor in tree_leaves(args[place] if place < len(args) else (kwargs or {}).get(name)):
                self._keep(tensor)
        return func(*args, **(kwargs or {}))

    def _keep(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            key: int = tensor.untyped_storage()._cdata
            if key in self._storages and key not in self._copies:
                self._copies[key] = self._storages[key].clone()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for now, before in self._registered:
            if now.keys() != before.keys() or any(now[name] is not param for name, param in before.items()):
                now.clear()
                now.update(before)
        for buffers, names in self._buffers:
            for name in buffers.keys() - names:
                del buffers[name]
        for param, data in self._held:
            if param.data_ptr() != data.data_ptr():
                param.data = data
        for module, training in self._training:
            module.training = training
        for param, learns in self._learning:
            if param.requires_grad != learns:
                param.requires_grad_(learns)
        with torch.no_grad():
            for key, copy in self._copies.items():
                self._storages[key].copy_(copy)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to: their positions and names."""
    declared = enumerate(func._schema.arguments)
    return tuple((at, each.name) for at, each in declared if each.alias_info is not None and each.alias_info.is_write)
