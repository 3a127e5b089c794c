"""Optimiser state other than per-parameter tensors: entries of its groups (apex's step, Prodigy's d), attributes, state
under keys that are not parameters (MADGRAD's k), and the same of optimisers that it wraps. All of it must survive a
resume, so one walk finds it, for the probe and for checkpoints.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

OF_TORCH = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))) | {"_opt_called", "step"}
"""Attributes of every optimiser, and those that learning-rate schedulers set on one."""

CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
)
"""Attributes that hold no state."""

Common = dict[str, dict[str, Any]]
"""Location ("group 0", "attributes", "state"; inside a wrapped optimiser "name/group 0") -> key -> value."""


def layers(optimizer: torch.optim.Optimizer, prefix: str = "") -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """An optimiser and those that it wraps, each with the prefix of its keys."""
    yield prefix, optimizer
    for name, value in vars(optimizer).items():
        inner = value if isinstance(value, (list, tuple)) else [value]
        for place, each in enumerate(inner):
            if isinstance(each, torch.optim.Optimizer):
                label = name if value is each else f"{name}.{place}"
                yield from layers(each, f"{prefix}{label}/")


def holders(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The mappings that hold state common to parameters. A mapping shared with a wrapper is listed once."""
    found: dict[str, Any] = {}
    for prefix, each in layers(optimizer):
        own = {f"{prefix}group {place}": group for place, group in enumerate(each.param_groups)}
        own |= {f"{prefix}attributes": vars(each), f"{prefix}state": each.state}
        known = {id(holder) for holder in found.values()}
        found |= {where: holder for where, holder in own.items() if id(holder) not in known}
    return found


def common(optimizer: torch.optim.Optimizer) -> Common:
    """All state that belongs to several parameters together, including what cannot be saved."""
    found: Common = {}
    for where, holder in holders(optimizer).items():
        if where.endswith("attributes"):
            entries = {key: value for key, value in holder.items() if key not in OF_TORCH and not _is_code(value)}
        elif where.endswith("state"):
            entries = {key: value for key, value in holder.items() if not isinstance(key, torch.Tensor)}
        else:
            entries = {key: value for key, value in holder.items() if key not in ("params", "param_names")}
        found[where] = entries
    return found


def _is_code(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and value:
        return all(map(_is_code, value))
    return isinstance(value, (*CODE, torch.optim.Optimizer, nn.Module))


def state_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, Any]:
    """The state of one parameter; keys of wrapped optimisers have their prefix."""
    found: dict[str, Any] = {}
    for prefix, each in _with_own_state(optimizer):
        if param in each.state:
            kept = each.state[param]
            entries = kept if isinstance(kept, dict) else {"": kept}
            found |= {f"{prefix}{key}": value for key, value in entries.items()}
    return found


def put_state(optimizer: torch.optim.Optimizer, param: nn.Parameter, state: dict[str, Any]) -> None:
    """Sets the state of a parameter."""
    for prefix, each in _with_own_state(optimizer):
        inside = {key.rpartition("/")[2]: value for key, value in state.items() if _prefix(key) == prefix}
        if inside:
            each.state[param] = inside[""] if inside.keys() == {""} else inside
        else:
            each.state.pop(param, None)


def _with_own_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    seen: set[int] = set()
    for prefix, each in layers(optimizer):
        if id(each.state) not in seen:
            seen.add(id(each.state))
            yield prefix, each


def _prefix(key: str) -> str:
    before, slash, _ = key.rpartition("/")
    return before + slash


def is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, text, lists, dicts and tensors."""
    if value is None or type(value) in (bool, int, float, str) or type(value) in (torch.Tensor, nn.Parameter):
        return True
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) in (str, int) for key in value) and all(map(is_plain, value.values()))
    return False


def copied(value: Any) -> Any:
    """A copy of a plain value, as a checkpoint makes it: a tensor in two places becomes two tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(copied, value))
    return {key: copied(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def exact(value: Any, depth: int = 4) -> Any:
    """A comparison key: equal for equal contents, including the contents of nested objects."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return ("tensor", str(value.dtype), tuple(value.shape))
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, torch.Generator):
        return ("generator", value.get_state().numpy().tobytes())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return (type(value).__name__, repr(value))
    if not depth:
        return type(value).__name__
    if isinstance(value, dict):
        return ("dict", tuple((_key(key), exact(entry, depth - 1)) for key, entry in value.items()))
    if isinstance(value, (set, frozenset)):
        return ("set", tuple(sorted(repr(entry) for entry in value)))
    if isinstance(value, CODE):
        return type(value).__name__
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):
        return (type(value).__name__, tuple(exact(entry, depth - 1) for entry in value))
    return (type(value).__name__, exact(dict(getattr(value, "__dict__", {})), depth - 1))


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int, float, bool)) else type(key).__name__


def holds_parameters(value: Any, params: set[int], depth: int = 4) -> bool:
    """Whether a value contains one of these parameters."""
    if isinstance(value, torch.Tensor):
        return id(value) in params
    if not depth:
        return False
    entries = [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(entries, (list, tuple, set)):
        return any(holds_parameters(entry, params, depth - 1) for entry in entries)
    return isinstance(value, int) and value in params
