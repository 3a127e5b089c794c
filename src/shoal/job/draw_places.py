"""Where a model draws random numbers, and of which shapes: seen in calls with two, three and five samples.

A dimension that grows with the number of samples is the sample dimension, whether it comes first or not and whether
heads or positions were flattened into it. A draw whose shape depends on anything else (tokens routed to an expert)
varies, and no rule can assign its elements to samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = (2, 3, 5)
"""Batch sizes of the probe calls."""


@dataclass(frozen=True)
class Place:
    """A draw in the model: a module's path, the number of its call in a forward, the number of the draw in the call."""

    path: str
    call: int
    draw: int

    @cached_property
    def key(self) -> int:
        text = f"{self.path}\0{self.call}\0{self.draw}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Drawn:
    """What is drawn at a place."""

    dim: int | None
    """The sample dimension; None if there is none: the draw is made once a step."""
    full: tuple[int, ...]
    """The full shape: of one sample, with its rows of the sample dimension first, or of all."""
    varies: bool = False


@dataclass(frozen=True)
class Places:
    """All draws of a model."""

    drawn: Mapping[Place, Drawn] = field(default_factory=dict)
    owners: frozenset[str] = frozenset()
    """Paths of the modules whose own code draws, or may."""
    outside: bool = False
    """Whether code outside the modules draws: the job's loss, or the way it calls the model."""
    other_generators: bool = False
    """Whether Python's or NumPy's generators are used: such draws have no place and are seeded once a step."""


def draw_places(model: nn.Module, run: Callable[[int], Any], around: Callable[[], Any] | None = None) -> Places:
    """Finds the draws. `run(n)` calls the model and the loss on n samples; `around()` is a context for each call."""
    seen: dict[int, dict[Place, tuple[int, ...]]] = {}
    failure: Exception | None = None
    for size in SIZES:
        recorder = _Recorder(model)
        try:
            with ExitStack() as stack:
                if around is not None:
                    stack.enter_context(around())
                recorder.watch(stack)
                run(size)
        except Exception as error:  # Some models take even batch sizes only; one successful call is enough.
            failure = error
            continue
        seen[size] = recorder.shapes
        if not recorder.shapes and len(seen) == 1:
            break
    may = {path for path, module in model.named_modules() if _may_draw(module)}
    if not seen and failure is not None:
        # Nothing is known, so every module is watched.
        return Places({}, frozenset(path for path, _ in model.named_modules()), True)
    places = {place for shapes in seen.values() for place in shapes}
    found = {place: _drawn({n: shapes[place] for n, shapes in seen.items() if place in shapes}) for place in places}
    drawn = {place: what for place, what in found.items() if what is not None}
    owners = {place.path for place in places} - {""}
    owners = {"" if path == ROOT else path for path in owners} | may
    return Places(drawn, frozenset(owners), any(place.path == "" for place in places))


ROOT = "(root)"
"""Marks the model itself: its path is empty, and so is that of code outside the model."""


def _may_draw(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    rate = getattr(module, "dropout", 0.0)
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and isinstance(rate, float) and rate > 0


def _drawn(shapes: Mapping[int, tuple[int, ...]]) -> Drawn | None:
    """What is drawn at a place, from its shape at each batch size; None if the shapes follow no rule."""
    (size, shape), *others = shapes.items()
    if len({len(other) for other in shapes.values()}) > 1:
        return None
    if not others:
        grows = [0] if shape and shape[0] % size == 0 else []
    else:
        grows = [dim for dim in range(len(shape)) if len({other[dim] for other in shapes.values()}) > 1]
    if not grows:
        return Drawn(None, shape)
    rows = {other[grows[0]] / n for n, other in shapes.items()}
    if len(grows) > 1 or len(rows) > 1 or shape[grows[0]] % size:
        by_sample = all(other[0] % n == 0 for n, other in shapes.items())
        return None if by_sample else Drawn(None, (), varies=True)
    dim = grows[0]
    return Drawn(dim, (shape[dim] // size, *shape[:dim], *shape[dim + 1 :]))


def is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers in this call."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    name = func.overloadpacket.__name__
    if "attention" not in name and "sdp" not in name:
        return True
    if "choice" in name:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return float(given.get("dropout_p", 0.0) or 0.0) > 0.0


class _Recorder(TorchDispatchMode):
    """The shape of every draw, by its place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes: dict[Place, tuple[int, ...]] = {}
        self._paths = {id(module): path or ROOT for path, module in model.named_modules()}
        self._calls: dict[str, int] = {}
        self._stack: list[list[Any]] = [["", 0, 0]]

    def watch(self, stack: ExitStack) -> None:
        before = register_module_forward_pre_hook(self._before)
        stack.callback(before.remove)
        after = register_module_forward_hook(self._after)
        stack.callback(after.remove)
        stack.enter_context(self)

    def _before(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            number = self._calls.get(path, 0)
            self._calls[path] = number + 1
            self._stack.append([path, number, 0])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._paths:
            self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_random(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        top = self._stack[-1]
        place = Place(top[0], top[1], top[2])
        top[2] += 1
        # A branch that depends on a draw must go the same way for every batch size.
        torch.default_generator.manual_seed(place.key >> 1)
        result = func(*args, **(kwargs or {}))
        tensor = result[0] if isinstance(result, tuple) else result
        self.shapes[place] = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()
        return result
