"""A forward that leaves no trace: what it does to buffers, attributes and random numbers is thrown away.

Some questions about a module are answered only by running it (who calls whom, which tokens go where), and the run that
counts comes later. For a rehearsal the module gets copies of its buffers and of other tensors that it holds
(`held_state.py`); everything is as it was afterwards, so that state changes once, in the run that counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shoal.workload.held_state import copy_of, found_in, values_in, with_copies


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
    held = found_in(part for part in module.modules() if id(part) not in left_alone)
    before = [(each, each.content()) for each in held]
    copies: dict[int, Any] = {}
    # Unseen by modes that count operations: a repetition under selective recomputation must be made of the same ones.
    with torch.no_grad(), _disable_current_modes():
        for _, content in before:
            for value in values_in(content):
                # One that carries a gradient is the result of an earlier forward, and is replaced, not changed.
                if id(value) not in copies and not (isinstance(value, torch.Tensor) and value.requires_grad):
                    copies[id(value)] = copy_of(value)[0]
    for each, content in before:
        if any(id(value) in copies for value in values_in(content)):
            each.put(with_copies(content, copies))
    try:
        yield
    finally:
        for each, content in before:
            if not each.has(content):
                each.put(content)
