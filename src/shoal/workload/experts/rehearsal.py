"""A forward that leaves no trace: what it does to buffers, attributes and random numbers is thrown away.

Some questions about a module are answered only by running it (who calls whom, which tokens go where), and the run that
counts comes later. For a rehearsal the module gets copies of its buffers and of its plain tensors, lists, dicts and
sets; the originals come back untouched afterwards, so that they change once, in the run that counts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that belong to the machinery of modules; all others are the module's own."""


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Where the random numbers stand: the CPU's, and the device's where it has its own."""
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
    """Inside, `module` works on copies of its state. Modules in `but`, and what lies in them, are left alone."""
    left_alone = {id(part) for each in but for part in each.modules()}
    kept = [_lay_aside(part) for part in module.modules() if id(part) not in left_alone]
    try:
        yield
    finally:
        for part, buffers, attributes in kept:
            part._buffers.clear()
            part._buffers.update(buffers)
            own = vars(part)
            for name in [name for name in own if name not in OF_EVERY_MODULE and name not in attributes]:
                del own[name]
            own.update(attributes)


def _lay_aside(part: nn.Module) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    buffers = dict(part._buffers)
    attributes = {name: value for name, value in vars(part).items() if name not in OF_EVERY_MODULE}
    # Unseen by modes that count operations: a repetition under selective recomputation must be made of the same ones.
    with torch.no_grad(), _disable_current_modes():
        for name, buffer in buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.clone()
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                # One that carries a gradient is the result of an earlier forward, and is replaced, not changed.
                if not value.requires_grad:
                    vars(part)[name] = value.clone()
            elif isinstance(value, (list, dict, set)):
                vars(part)[name] = copy.copy(value)
    return part, buffers, attributes
