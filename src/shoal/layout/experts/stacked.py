"""Experts that are stacked: one module holds the parameters of all of them, expert by expert along the first dimension.

It is called with tokens [T, H], the indices of the experts of each token [T, k] and their weights [T, k], and returns
[T, H']. Whether it can be split is tried on the arguments of a call: the results of its slots must add up, and with the
parameters of a few experts only (and the attribute that counts them changed) it must return the same for their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from shoal.layout.experts.listed import alike
from shoal.layout.experts.rehearsal import rehearsing
from shoal.layout.experts.watch import MemberCall

MOST_COUNTS = 6
"""Most attributes that equal the number of experts of which all combinations are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacked:
    """A module with stacked experts."""

    width: int
    result_width: int
    count_names: tuple[str, ...]
    keeps_dtype: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedArguments:
    """The three tensors of a call, and how to make the same call with others."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def call(self, forward: Any, *, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        """Repeats the call with other tensors in the same positions."""
        new = {id(self.hidden): hidden, id(self.index): index, id(self.weights): weights}
        args = [new.get(id(value), value) for value in self.args]
        return forward(*args, **{name: new.get(id(value), value) for name, value in self.kwargs.items()})


def stacked_count(module: nn.Module) -> int:
    """The common leading dimension of a module's own parameters, if it has matrices there; 0 otherwise."""
    params = list(module.parameters(recurse=False))
    counts = {param.shape[0] if param.dim() else 0 for param in params}
    count = next(iter(counts)) if len(counts) == 1 else 0
    return count if count >= 2 and any(param.dim() >= 2 for param in params) else 0


def routed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RoutedArguments | None:
    """Tokens, indices and weights among the arguments, recognised by dtype and shape; None if it is no such call."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    indices = [value for value in given if value.dtype in (torch.int64, torch.int32) and value.dim() == 2]
    floats = [value for value in given if value.is_floating_point() and value.dim() == 2]
    others = [value for value in (*args, *kwargs.values()) if value is not None and not isinstance(value, torch.Tensor)]
    if len(given) != 3 or len(indices) != 1 or len(floats) != 2 or others:
        return None
    index = indices[0]
    # If the width of tokens equals their number of slots, the first tensor is the tokens, as in all known modules.
    weights = next((value for value in reversed(floats) if value.shape == index.shape), None)
    if weights is None:
        return None
    hidden = floats[0] if weights is floats[1] else floats[1]
    if hidden.shape[0] != index.shape[0]:
        return None
    return RoutedArguments(hidden=hidden, index=index, weights=weights, args=args, kwargs=kwargs)


@contextmanager
def counting(module: nn.Module, names: tuple[str, ...], count: int) -> Iterator[None]:
    """Inside, the module's attributes say that it has this number of experts."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(dict.fromkeys(names, count))
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def only(module: nn.Module, experts: slice) -> Iterator[None]:
    """Inside, the module holds the parameters of these experts only."""
    before = dict(module._parameters)
    for name, param in before.items():
        if param is not None:
            module._parameters[name] = nn.Parameter(param.detach()[experts], requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(before)


def why_not_stacked(module: nn.Module, count: int, call: MemberCall) -> Stacked | str | None:
    """The experts; a reason why they cannot be distributed; or None if they are not experts."""
    found = routed(call.args, call.kwargs)
    if found is None or not isinstance(call.output, torch.Tensor) or call.output.dim() != 2:
        return None
    if not found.index.numel() or int(found.index.min()) < 0 or int(found.index.max()) > count:
        return None
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), rehearsing(module):
            return _tried(module, count, found)
    finally:
        module.train(was_training)


def _tried(module: nn.Module, count: int, found: RoutedArguments) -> Stacked | str:
    hidden, weights, index = found.hidden, found.weights, found.index
    whole = _asked(module, found, index, weights)
    slots = [_asked(module, found, index[:, k : k + 1], weights[:, k : k + 1]) for k in range(index.shape[1])]
    if not alike(torch.stack(slots).sum(0), whole):
        return "the results of its experts for a token do not add up slot by slot"
    few = max(1, count // 2)
    if any(buffer.dim() and buffer.shape[0] == count for buffer in module.buffers(recurse=False)):
        return "it has a buffer with an entry for each expert, which cannot be split along with the parameters"
    expected, local = [], torch.arange(index.numel(), device=index.device).view_as(index) % few
    for start in (0, count - few):
        expected.append(_asked(module, found, (local + start).to(index.dtype), weights))
    for names in _choices(module, count):
        if _fits(module, count, few, names, found, local.to(index.dtype), expected):
            return Stacked(
                width=hidden.shape[1],
                result_width=whole.shape[1],
                count_names=names,
                keeps_dtype=whole.dtype == hidden.dtype,
            )
    return (
        f"it does not run with the parameters of {few} of its {count} experts; the number of experts should be an "
        "attribute of the module, or the first dimension of its parameters"
    )


def _asked(module: nn.Module, found: RoutedArguments, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # Copies: the module may change what it is given.
    return found.call(module.forward, hidden=found.hidden.clone(), index=index.clone(), weights=weights.clone())


def _choices(module: nn.Module, count: int) -> Iterator[tuple[str, ...]]:
    """Attributes that may be the number of experts: first all that equal it, then fewer (one may be a width)."""
    names = [name for name, value in vars(module).items() if type(value) is int and value == count][:MOST_COUNTS]
    for size in range(len(names), -1, -1):
        yield from combinations(names, size)


def _fits(
    module: nn.Module,
    count: int,
    few: int,
    names: tuple[str, ...],
    found: RoutedArguments,
    index: torch.Tensor,
    expected: list[torch.Tensor],
) -> bool:
    try:
        for start, answer in zip((0, count - few), expected, strict=True):
            with only(module, slice(start, start + few)), counting(module, names, few):
                got = _asked(module, found, index, found.weights)
            if not alike(got, answer):
                return False
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True
