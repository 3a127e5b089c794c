"""The name of a proof: a digest of all that a layout depends on, so that no proof is repeated and none is borrowed.

Into it go the strategy, the classes of the model's modules with the source of their code and of the functions that it
calls, their plain attributes, the names and shapes of parameters, the loss, the shape of a sample, what the job
declares, and the versions of torch and of Shoal, whose own code for cutting models counts by its text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import types
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shoal
from shoal.job import Job
from shoal.job.facts import settings_of
from shoal.strategy import Strategy

OWN_ROOMS = ("workload", "parallel")
"""The rooms of Shoal that decide how a model is cut and run it."""

FOREIGN = frozenset({"torch", "numpy", "builtins", *sys.stdlib_module_names})
"""Modules that count by their version, or not at all."""


def fingerprint(job: Job, model: nn.Module, strategy: Strategy) -> str:
    """The digest for a job's model, which may be one without memory, under a strategy."""
    digest = hashlib.sha256()

    def add(what: str, value: Any) -> None:
        digest.update(f"{what}\0{json.dumps(value, sort_keys=True, default=repr)}\0".encode())

    add("strategy", str(strategy))
    add("versions", [str(torch.__version__), shoal.__version__, _own_text()])
    add("parameters", [(name, list(p.shape), p.requires_grad) for name, p in model.named_parameters()])
    add("tied", [name for name, _ in model.named_parameters(remove_duplicate=False)])
    add("buffers", [(name, list(buffer.shape)) for name, buffer in model.named_buffers()])
    sources: dict[str, str] = {}
    for path, module in model.named_modules():
        add(path, [f"{type(module).__module__}.{type(module).__qualname__}", _plain(vars(module))])
        _collect(type(module), sources)
        _collect(vars(module).get("forward"), sources)
    _collect(job.loss, sources)
    add("sources", sources)
    add("config", _plain(settings_of(model)))
    sample = job.train.batch(np.arange(1))
    add("sample", {name: (list(entry.shape[1:]), str(entry.dtype)) for name, entry in sample.items()})
    add("job", [list(job.inputs.items()) if isinstance(job.inputs, dict) else list(job.inputs), repr(job.layout)])
    return digest.hexdigest()


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes that are values and not objects: sizes, rates, switches."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(is_plain(each) for each in value)
        return value is None or isinstance(value, (bool, int, float, str))

    return {name: value for name, value in attributes.items() if name != "training" and is_plain(value)}


def _collect(thing: Any, found: dict[str, str]) -> None:
    """Enters the source of a class or function, and of what its code calls by name, as far as it is the user's own."""
    while isinstance(thing, partial):
        thing = thing.func
    if not isinstance(thing, (type, types.FunctionType)):
        thing = getattr(thing, "__func__", type(thing) if callable(thing) else None)
    if thing is None or (thing.__module__ or "").partition(".")[0] in FOREIGN:
        return
    name = f"{thing.__module__}.{thing.__qualname__}"
    if name in found:
        return
    file = _file_of(thing)
    if file is not None and "site-packages" in file:
        found[name] = _digest_of(file)  # A library: its file as a whole.
        return
    try:
        found[name] = inspect.getsource(thing)
    except (OSError, TypeError):
        found[name] = name  # Typed in at a prompt, or made by a program: only its name is known.
    for function in _functions(thing):
        for called in _names(function.__code__):
            if isinstance(other := function.__globals__.get(called), (type, types.FunctionType)):
                _collect(other, found)
    for base in getattr(thing, "__bases__", ()):
        _collect(base, found)


def _functions(thing: Any) -> list[types.FunctionType]:
    if isinstance(thing, types.FunctionType):
        return [thing]
    unwrapped = (getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(thing).values())
    return [value for value in unwrapped if isinstance(value, types.FunctionType)]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _file_of(thing: Any) -> str | None:
    try:
        return inspect.getsourcefile(thing)
    except TypeError:
        return None


@cache
def _digest_of(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return file


@cache
def _own_text() -> str:
    home = Path(shoal.__file__).parent
    files = [file for room in OWN_ROOMS for file in sorted((home / room).rglob("*.py"))]
    return hashlib.sha256("".join(_digest_of(str(file)) for file in files).encode()).hexdigest()
