"""Random numbers of optimisers that draw some (SGLD, stochastic rounding), the same under every strategy.

As in `randomness.py`, a number is a function of its place: (seed, sample counter of the step, parameter name, number of
the draw, element). Replicas therefore draw the same numbers, a rank draws those of the elements it holds, and a serial
run draws them all. A draw is attributed to the parameter that the optimiser read last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.job.draw_places import is_random
from shoal.job.draw_rules import RULES, Numbers, key_of
from shoal.job.pointwise import OptimizerFactory


@dataclass(frozen=True)
class ParameterRange:
    """Elements of a named parameter inside a tensor that the optimiser updates."""

    name: str
    full: tuple[int, ...]
    """The full shape of the parameter."""
    part: Callable[[Tensor], Tensor] | None
    """Maps the full parameter to the part that this rank holds; None: all of it."""
    start: int
    """The first element, counted in this rank's flattened part."""
    num: int
    at: int
    """Offset in the optimiser's tensor."""


class UpdateDraws:
    """The random numbers of an optimiser's updates."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._step, self._update = 0, 0
        self._numbers = Numbers()

    def begin(self, counter: int) -> None:
        """Starts a step whose first sample has this counter."""
        self._step, self._update = counter, 0

    @contextmanager
    def update(self, params: Iterable[tuple[Tensor, Sequence[ParameterRange]]]) -> Iterator[None]:
        """Wraps one call of the optimiser's step."""
        key = key_of(self.seed, self._step, self._update, -2)
        self._update += 1
        torch.default_generator.manual_seed(key >> 1)  # Operations without a rule draw at least the same on all ranks.
        with _Placed(params, self._numbers, key):
            yield


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where its elements begin; works on meta tensors too."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()


class _Attributed(TorchDispatchMode):
    """Attributes a draw to the parameter that the update read last, if their sizes agree."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__()
        self.params = list(params)
        self.at: dict[tuple[int, int], int] = {}
        for number, param in enumerate(self.params):
            for tensor in (param, param.grad):
                if tensor is not None and tensor.layout is torch.strided and tensor.numel():
                    self.at[_place(tensor)] = number
        self.now: int | None = None
        self.draws: dict[tuple[int, ...], int] = {}
        """Draws so far, by parameter; by shape for draws that belong to no parameter."""
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        for leaf in tree_leaves((args, named)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
                self.now = self.at.get(_place(leaf), self.now)
        self.found = self.found or is_random(func, args, named)
        rule = RULES.get(func)
        return func(*args, **named) if rule is None else rule(self._drawn, func, args, named)

    def _drawn(self, shape: Sequence[int], device: torch.device, kind: str) -> Tensor:
        sizes = tuple(int(length) for length in shape)
        mine = self.now is not None and self.params[self.now].numel() == int(np.prod(sizes, dtype=np.int64))
        memo = (self.now,) if mine and self.now is not None else (-1, *sizes)
        number = self.draws[memo] = self.draws.get(memo, -1) + 1
        return self.numbers_of(self.now if mine else None, number, sizes, kind)

    def numbers_of(self, param: int | None, number: int, shape: tuple[int, ...], kind: str) -> Tensor:
        """The values of one draw, for a parameter or (None) for no parameter."""
        raise NotImplementedError


class _Placed(_Attributed):
    """Each element of a parameter draws a number of its own."""

    def __init__(self, params: Iterable[tuple[Tensor, Sequence[ParameterRange]]], numbers: Numbers, key: int) -> None:
        given = list(params)
        super().__init__(param for param, _ in given)
        self.stretches = [stretches for _, stretches in given]
        self.numbers, self.key = numbers, key

    def numbers_of(self, param: int | None, number: int, shape: tuple[int, ...], kind: str) -> Tensor:
        if param is None:
            return torch.from_numpy(self.numbers.fill(kind, shape, key_of(number, *shape), self.key))
        flat = torch.from_numpy(self.numbers.empty(kind, (self.params[param].numel(),))).zero_()
        for stretch in self.stretches[param]:
            place = int.from_bytes(hashlib.blake2b(stretch.name.encode(), digest_size=8).digest(), "big")
            drawn = torch.from_numpy(self.numbers.fill(kind, stretch.full, key_of(place, number), self.key))
            held = drawn if stretch.part is None else stretch.part(drawn)
            flat[stretch.at : stretch.at + stretch.num] = held.reshape(-1)[stretch.start : stretch.start + stretch.num]
        return flat.reshape(shape)


class _Constant(_Attributed):
    """Every draw for a parameter gives the same number, since its elements draw by their place. Draws for no parameter
    (one number per tensor, a row, a sketch) differ: an optimiser that makes them is not element-wise."""

    def numbers_of(self, param: int | None, number: int, shape: tuple[int, ...], kind: str) -> Tensor:
        if param is not None:
            return torch.full(shape, 0.5)
        values = torch.arange(1, 1 + int(np.prod(shape, dtype=np.int64)), dtype=torch.float64).reshape(shape)
        return (0.25 + (0.618 * (values + 31 * number)) % 0.5).float()


def draws_numbers(optimizer: OptimizerFactory) -> bool:
    """Whether an update draws random numbers. Tried on a small matrix and a vector, or on only one of them if the
    optimiser does not take the other."""
    for shapes in (((3, 4), (5,)), ((3, 4),), ((5,),)):
        params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape)) for shape in shapes]
        with torch.random.fork_rng(devices=[]), _Constant([]) as watch:
            try:
                running = optimizer([{"params": params}])
                for _ in range(2):
                    for param in params:
                        param.grad = torch.ones_like(param)
                    running.step()
            except Exception:  # An optimiser that needs more than gradients is refused elsewhere, by name.
                if not watch.found:
                    continue
        return watch.found
    return False


def without_draws(optimizer: OptimizerFactory) -> OptimizerFactory:
    """The same optimiser with constants in place of its draws, so that two runs of it can be compared."""
    if not draws_numbers(optimizer):
        return optimizer

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        built = optimizer(groups)
        cls: Any = type(built)

        @wraps(cls.step)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _Constant(param for group in self.param_groups for param in group["params"]):
                return cls.step(self, *args, **kwargs)

        # A subclass of the same name: it adds nothing to the optimiser's own state.
        built.__class__ = type(cls.__name__, (cls,), {"step": step})
        return built

    return make
