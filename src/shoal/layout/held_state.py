"""The state of modules that Python code can change: buffers, attributes, and what they contain, through lists,
dictionaries, sets, objects of the model's own classes and random generators.

Other modules are not followed, nor are objects of libraries, which may hold handles and locks. Of long containers only
the container itself is tracked, not its contents.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

OWN = frozenset(vars(nn.Module())) | {"forward"}
"""Attributes of every module; of these a forward changes only buffers."""
LONGEST = 1000
"""Entries of a container that are followed."""
OPAQUE = frozenset({"torch", "numpy", "shoal", *sys.stdlib_module_names})
"""Packages whose objects are not followed."""
ATOMS = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, MethodType, ModuleType, nn.Module)


def _base(what: Any) -> Any:
    """The container itself, below classes that answer with something else than they hold (a registry of transformers
    makes an object of the class that it keeps)."""
    return next(each for each in (OrderedDict, dict, list, deque) if isinstance(what, each))


class StateHolder:
    """An object that holds values under keys or indices."""

    def __init__(self, what: Any, *, skip: frozenset[str] = frozenset()) -> None:
        self.what, self.skip = what, skip

    def content(self) -> Any:
        """Its current content, copied: a dictionary, a list or a set, or a generator's state."""
        what = self.what
        if isinstance(what, dict):
            return {key: dict.__getitem__(what, key) for key in _base(what).__iter__(what) if key not in self.skip}
        if isinstance(what, set):
            return set(set.__iter__(what))
        if isinstance(what, (list, deque)):
            return list(_base(what).__iter__(what))
        if isinstance(what, torch.Generator):
            return what.get_state().numpy().tobytes()
        if isinstance(what, random.Random):
            return what.getstate()
        if isinstance(what, (np.random.Generator, np.random.RandomState)):
            return _numbers(_state_of(what))
        return {name: getattr(what, name) for name in slots_of(what) if hasattr(what, name)}

    def has(self, content: Any) -> bool:
        """Whether it still holds this content: the same objects in the same places."""
        now = self.content()
        if isinstance(now, dict):
            return now.keys() == content.keys() and all(map(is_, now.values(), map(content.__getitem__, now)))
        if isinstance(now, list):
            return len(now) == len(content) and all(map(is_, now, content))
        return bool(now == content)

    def put(self, content: Any) -> None:
        """Replaces its content."""
        what = self.what
        if isinstance(what, dict):
            base = _base(what)
            for key in [key for key in base.__iter__(what) if key not in self.skip]:
                base.__delitem__(what, key)
            for key, value in content.items():  # A Counter's update would add.
                base.__setitem__(what, key, value)
        elif isinstance(what, list):
            list.__setitem__(what, slice(None), content)
        elif isinstance(what, set):
            set.clear(what)
            set.update(what, content)
        elif isinstance(what, deque):
            deque.clear(what)
            deque.extend(what, content)
        elif isinstance(what, torch.Generator):
            what.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        elif isinstance(what, random.Random):
            what.setstate(content)
        elif isinstance(what, np.random.Generator):
            what.bit_generator.state = _arrays(content)
        elif isinstance(what, np.random.RandomState):
            what.set_state(_arrays(content))
        else:
            for name, value in content.items():
                setattr(what, name, value)


class HeldNow:
    """A snapshot of the state of modules, to compare with later."""

    def __init__(self, modules: Iterable[nn.Module], more: Iterable[StateHolder] = ()) -> None:
        self.before = [(held, held.content()) for held in (*found_in(modules), *more)]
        self._copies: dict[int, tuple[Any, tuple[Any, int]]] = {}
        for _, content in self.before:
            for value in values_in(content):
                if id(value) not in self._copies:
                    self._copies[id(value)] = (value, copy_of(value))

    def changed(self) -> tuple[list[tuple[StateHolder, Any]], dict[int, Any]]:
        """Holders whose content changed since then, with the content before; and, by id, the earlier values of arrays
        that were written to."""
        old = {key: copied[0] for key, (value, copied) in self._copies.items() if is_changed(value, copied)}
        rows = [
            (held, content)
            for held, content in self.before
            if not held.has(content) or any(id(value) in old for value in values_in(content))
        ]
        return rows, old

    def changed_names(self, model: nn.Module) -> list[str]:
        """The buffers and attributes of a model's modules that changed since then, or whose contents did."""
        rows, old = self.changed()
        changed = {id(held.what): content for held, content in rows}
        names = []
        for path, module in model.named_modules():
            for own, skip in ((module._buffers, frozenset()), (vars(module), OWN)):
                for key in own.keys() - skip:
                    inside: list[StateHolder] = []
                    below([own[key]], inside, set())
                    before = changed[id(own)].get(key, self) if id(own) in changed else own[key]
                    if before is not own[key] or id(before) in old or any(id(each.what) in changed for each in inside):
                        names.append(f"{path}.{key}" if path else key)
        return sorted(names)


def found_in(modules: Iterable[nn.Module]) -> list[StateHolder]:
    """All state holders of these modules, each once."""
    found: list[StateHolder] = []
    seen: set[int] = set()
    for module in modules:
        if module._buffers:
            found.append(StateHolder(module._buffers))
        own = vars(module)
        # Include modules without attributes: a forward may be the first to set one.
        found.append(StateHolder(own, skip=OWN))
        below([own[key] for key in own.keys() - OWN], found, seen)
    return found


def below(values: Iterable[Any], found: list[StateHolder], seen: set[int]) -> None:
    """Adds what some values contain: containers, generators and objects of the job's own classes."""
    for value in values:
        if isinstance(value, (*ATOMS, torch.Tensor, np.ndarray)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            below(value, found, seen)
        elif isinstance(value, dict):
            found.append(StateHolder(value))
            if len(value) <= LONGEST:
                below(dict.values(value), found, seen)
        elif isinstance(value, (list, deque, set)):
            found.append(StateHolder(value))
            if len(value) <= LONGEST:
                below(value, found, seen)
        elif isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
            found.append(StateHolder(value))
        elif type(value) is SimpleNamespace or type(value).__module__.partition(".")[0] not in OPAQUE:
            if hasattr(value, "__dict__"):
                found.append(StateHolder(vars(value)))
                below(vars(value).values(), found, seen)
            if slots_of(value):
                found.append(StateHolder(value))
                below(found[-1].content().values(), found, seen)


@contextmanager
def on_copies(held: Iterable[StateHolder]) -> Iterator[None]:
    """Inside, these hold copies of their arrays; afterwards their content is restored."""
    before = [(each, each.content()) for each in held]
    copies: dict[int, Any] = {}
    # Hidden from dispatch modes: selective recomputation requires the same sequence of operations both times.
    with torch.no_grad(), _disable_current_modes():
        for _, content in before:
            for value in values_in(content):
                # A tensor that requires grad is the result of an earlier forward: it is replaced, not written to.
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


def values_in(content: Any) -> Iterator[Any]:
    """The arrays in a holder's content."""
    if not isinstance(content, (dict, list)) or len(content) > LONGEST:
        return
    for value in content.values() if isinstance(content, dict) else content:
        if isinstance(value, (torch.Tensor, np.ndarray)) and not isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, tuple):
            yield from values_in(list(value))


def results_held(model: nn.Module) -> list[torch.Tensor]:
    """Results of an earlier forward that modules keep (torch.nn.utils.weight_norm). PyTorch does not copy them."""
    held = [value for each in found_in(model.modules()) for value in values_in(each.content())]
    return [value for value in held if isinstance(value, torch.Tensor) and value.grad_fn is not None]


def copy_of(value: Any) -> tuple[Any, int]:
    """A copy that does not change when the original is written to, and the original's version."""
    if isinstance(value, np.ndarray):
        return value.copy(), 0
    version = 0 if value.is_inference() else value._version
    return (value.detach().clone() if value.grad_fn is None else value), version


def is_changed(value: Any, copied: tuple[Any, int]) -> bool:
    """Whether an array has been written to since it was copied."""
    copy, version = copied
    if isinstance(value, np.ndarray):
        return value.shape != copy.shape or not _same(value, copy)
    if not value.is_inference() and value._version != version:
        return True
    # A comparison would synchronise with the accelerator, so there every buffer counts as changed.
    return value is not copy and (value.device.type != "cpu" or value.shape != copy.shape or not _same(value, copy))


def with_copies(content: Any, fresh: dict[int, Any]) -> Any:
    """A content in which arrays are replaced by those that `fresh` has for their id."""
    if isinstance(content, dict):
        return {key: _fresh(value, fresh) for key, value in content.items()}
    return [_fresh(value, fresh) for value in content] if isinstance(content, list) else content


def _fresh(value: Any, fresh: dict[int, Any]) -> Any:
    if not isinstance(value, tuple):
        return fresh.get(id(value), value)
    parts = [_fresh(part, fresh) for part in value]
    if all(map(is_, parts, value)):
        return value
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)


def _same(value: Any, copy: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, copy) or bool(((value == copy) | (value != value)).all())
    return bool(((value == copy) | (value != value)).all())


def slots_of(value: Any) -> list[str]:
    """Names of what an object holds outside its dictionary."""
    names: list[str] = []
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _state_of(what: Any) -> Any:
    return what.get_state(legacy=False) if isinstance(what, np.random.RandomState) else what.bit_generator.state


def _numbers(state: Any) -> Any:
    """A generator's state in comparable values: (bytes, type) for an array, pairs for a dictionary."""
    if isinstance(state, dict):
        return tuple((key, _numbers(value)) for key, value in state.items())
    return (state.tobytes(), state.dtype.str) if isinstance(state, np.ndarray) else state


def _arrays(state: Any) -> Any:
    if not isinstance(state, tuple):
        return state
    if isinstance(state[0], bytes):
        return np.frombuffer(state[0], dtype=state[1])
    return {key: _arrays(value) for key, value in state}


GENERATORS = (StateHolder(random._inst), StateHolder(np.random.mtrand._rand))  # type: ignore[attr-defined]
"""Python's and NumPy's global generators, from which any code may draw. PyTorch's checkpointing restores its own."""
