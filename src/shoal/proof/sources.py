"""What code a model runs and what values it holds, as text that changes when either does.

Followed from an object: its class, the classes of what it holds, the functions that their code names, also through a
module (`ops.f`) or a closure, and every value in between. The user's own code counts by its source, a library by the
file it is in, torch and Python by their version, which is noted elsewhere.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.layout.held_outside import names_in
from shoal.layout.held_state import slots_of

FOREIGN = frozenset({"torch", "numpy", "builtins", *sys.stdlib_module_names})
"""Modules that count by their version, or not at all."""
MOST_BYTES = 1 << 20
"""Tensors up to this size count by their values, larger ones by their shape."""
DEEPEST = 12
WRAPPED = ("__func__", "fget", "func")
"""Where descriptors keep the function that they wrap."""
CHANGING = frozenset({"training"})
"""Attributes that describe how a module is used, not what it is."""


class Collected:
    """Source texts and values, by where they were found."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}
        """Objects that were followed; they are kept, so that no other takes their identity."""

    def add(self, where: str, value: Any, depth: int = 0) -> None:
        """Follows a value of any kind."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            self.found[where] = repr(value)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            self.found[where] = digest_of_tensor(torch.as_tensor(value))
        elif isinstance(value, types.ModuleType) or depth > DEEPEST:
            self.found[where] = getattr(value, "__name__", type(value).__qualname__)
        elif id(value) in self._seen:
            return
        else:
            self._seen[id(value)] = value
            self._follow(where, value, depth + 1)

    def add_object(self, where: str, value: Any, depth: int = 0) -> None:
        """Follows an object: its class, and what it holds."""
        self.found[where] = f"{type(value).__module__}.{type(value).__qualname__}"
        self.add(f"class {self.found[where]}", type(value), depth)
        # Parameters, buffers and submodules of a module are added on their own.
        skipped = CHANGING | ({"_parameters", "_modules"} if isinstance(value, nn.Module) else set())
        for name, held in attributes(value):
            if name not in skipped and not isinstance(held, nn.Module):
                self.add(f"{where}.{name}", held, depth)

    def _follow(self, where: str, value: Any, depth: int) -> None:
        if isinstance(value, partial):
            self.add(f"{where} of", value.func, depth)
            self.add(f"{where} with", [list(value.args), value.keywords], depth)
        elif isinstance(value, Mapping):
            self.found[where] = len(value)
            for key in value:
                self.add(f"{where}[{key!r:.80}]", value[key], depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.found[where] = len(value)
            for number, each in enumerate(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value):
                self.add(f"{where}[{number}]", each, depth)
        elif isinstance(value, types.MethodType):
            self.add(where, value.__func__, depth)
            if not isinstance(value.__self__, nn.Module):
                self.add(f"{where} of", value.__self__, depth)
        elif isinstance(value, (type, types.FunctionType)):
            self._code(value, depth)
        elif not isinstance(value, nn.Module):
            self.add_object(where, value, depth)

    def _code(self, thing: Any, depth: int) -> None:
        """A class or function: its source, and what its code names."""
        if (thing.__module__ or "").partition(".")[0] in FOREIGN:
            return
        name = f"{thing.__module__}.{thing.__qualname__}"
        file = _file_of(thing)
        if file is not None and "site-packages" in file:
            self.found[f"file {file}"] = digest_of_file(file)  # A library: its complete file.
            return
        try:
            self.found[f"source of {name}"] = inspect.getsource(thing)
        except (OSError, TypeError):
            self.found[f"source of {name}"] = [list(_code_of(function.__code__)) for function in _functions(thing)]
        for function in _functions(thing):
            if isinstance(thing, type):
                # A class's source is not the code of a function that was put into it later.
                self.found[f"code of {name}.{function.__qualname__}"] = list(_code_of(function.__code__))
            for named, value in _named(function):
                self.add(f"{function.__module__}.{named}", value, depth)
        for base in getattr(thing, "__bases__", ()):
            self.add(f"base {base.__qualname__}", base, depth)
        if isinstance(thing, type):
            for named, value in vars(thing).items():
                if not named.startswith("__") and not hasattr(value, "__get__"):
                    self.add(f"{name}.{named}", value, depth)


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, in its dictionary and in its slots."""
    yield from sorted(getattr(value, "__dict__", {}).items())
    yield from ((name, getattr(value, name)) for name in slots_of(value) if hasattr(value, name))


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Shape and type, and the values of a small tensor that has any."""
    about = f"{tuple(tensor.shape)} {tensor.dtype}"
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta
    if not plain or tensor.layout is not torch.strided or tensor.numel() * tensor.element_size() > MOST_BYTES:
        return about
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{about} {hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()}" if len(values) else about


def _named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's code names: globals, what it reads of modules among them, its closure and defaults."""
    names = set(names_in(function.__code__))
    spaces: list[tuple[str, Mapping[str, Any]]] = [("", function.__globals__)]
    entered: set[int] = set()
    for prefix, space in spaces:  # Grows while it is walked.
        for name in sorted(names & space.keys()):
            value = space[name]
            if not isinstance(value, types.ModuleType):
                yield f"{prefix}{name}", value
            elif value.__name__.partition(".")[0] not in FOREIGN and id(value) not in entered:
                entered.add(id(value))
                spaces.append((f"{prefix}{name}.", vars(value)))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{function.__qualname__} closure {name}", cell.cell_contents
        except ValueError:
            continue  # Not filled yet.
    yield f"{function.__qualname__} defaults", [function.__defaults__, function.__kwdefaults__]


def _functions(thing: Any) -> list[types.FunctionType]:
    if isinstance(thing, types.FunctionType):
        return [thing]
    unwrapped: Iterable[Any] = (_unwrapped(value) for value in vars(thing).values())
    return [value for value in unwrapped if isinstance(value, types.FunctionType)]


def _unwrapped(value: Any) -> Any:
    """The function in a method, property, cached property or partial method."""
    return next((held for held in (getattr(value, name, None) for name in WRAPPED) if held is not None), value)


def _code_of(code: types.CodeType) -> Iterator[str]:
    """What a function does, as text: its instructions, names and constants, also of functions within it."""
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_freevars))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_of(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _file_of(thing: Any) -> str | None:
    try:
        return inspect.getsourcefile(thing)
    except (TypeError, OSError):  # Of a class of a notebook's cell.
        return None


@cache
def digest_of_file(file: str) -> str:
    """Of a file's content; its name where it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return file
