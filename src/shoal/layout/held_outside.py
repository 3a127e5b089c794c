"""State that a job's code keeps outside its model's modules: in the loss, in closures, globals and class attributes.

It is found by following the names used in the code of the loss and the model, as far as that code is the job's own and
not a library's. Rehearsals restore it, so that trial runs before training have no effect; every run of a proof starts
from it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.job import Job
from shoal.layout.held_state import OPAQUE, StateHolder, below, found_in, on_copies

ATOMS = (bool, int, float, complex, str, bytes, type(None))


class _Names(StateHolder):
    """Some entries of a namespace: globals used by code, or class attributes."""

    def __init__(self, space: Any, names: Iterable[str]) -> None:
        super().__init__(space)
        self.names = sorted(names)

    def content(self) -> Any:
        space = vars(self.what) if isinstance(self.what, type) else self.what
        return {name: space[name] for name in self.names if name in space}

    def put(self, content: Any) -> None:
        for name, value in content.items():
            if isinstance(self.what, type):
                setattr(self.what, name, value)
            else:
                self.what[name] = value


class _Cell(StateHolder):
    """A variable of an enclosing function."""

    def content(self) -> Any:
        try:
            return [self.what.cell_contents]
        except ValueError:
            return []  # Not filled yet.

    def put(self, content: Any) -> None:
        if content:
            self.what.cell_contents = content[0]


class Outside:
    """State outside modules that the code of a job's model and loss holds."""

    def __init__(self, job: Job) -> None:
        self.held: list[StateHolder] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []
        """Objects that were followed; kept alive so that no other object reuses their id."""
        self._below: set[int] = set()
        self._follow(job)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, code works on copies of the state; afterwards the state is restored."""
        with on_copies(self.held):
            yield

    def _follow(self, value: Any) -> None:
        if isinstance(value, (*ATOMS, types.ModuleType)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, partial):
            self._values([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, types.MethodType):
            self._values([value.__func__, value.__self__])
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, nn.Module):
            self.held += found_in(value.modules())
            self._values(type(part) for part in value.modules())
        elif isinstance(value, Job):
            self._values([value.model, value.loss])
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            return
        else:
            below([value], self.held, self._below)
            if isinstance(value, dict):
                self._values(dict.values(value))
            elif isinstance(value, (list, tuple, set)):
                self._values(value)
            elif _own(type(value)):
                self._values([type(value), *getattr(value, "__dict__", {}).values()])

    def _values(self, values: Iterable[Any]) -> None:
        for value in values:
            self._follow(value)

    def _function(self, function: types.FunctionType) -> None:
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, types.FunctionType):
            return
        if not _own(function):
            # Shoal's own wrappers hold no state, but the job's functions inside them may.
            if function.__module__.startswith("shoal."):
                self._values(value for cell in function.__closure__ or () for value in _Cell(cell).content())
            return
        space = function.__globals__
        named = {name: space[name] for name in names_in(function.__code__) if name in space}
        state = [name for name, value in named.items() if not isinstance(value, (types.ModuleType, type, CODE))]
        if state:
            self.held.append(_Names(function.__globals__, state))
        for cell in function.__closure__ or ():
            holder = _Cell(cell)
            if not any(isinstance(value, (types.ModuleType, type, CODE)) for value in holder.content()):
                self.held.append(holder)
            self._values(holder.content())
        self._values(named.values())
        self._values([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])

    def _class(self, cls: type) -> None:
        if not _own(cls):
            return
        values = {k: v for k, v in vars(cls).items() if not k.startswith("__") and not hasattr(v, "__get__")}
        state = [name for name, value in values.items() if not isinstance(value, (types.ModuleType, type))]
        if state:
            self.held.append(_Names(cls, state))
        self._values(values.values())
        for value in vars(cls).values():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, types.FunctionType):
                self._follow(inner)
        self._values(cls.__bases__)


CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)


def _own(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "torch").partition(".")[0] not in OPAQUE


def names_in(code: types.CodeType) -> Iterator[str]:
    """What a function's code names, functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
