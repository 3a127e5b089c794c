"""What a block's forward changes of its own state (buffers, counters, attributes), so that a repetition can be undone.

Spectral norm iterates its vectors in forward, batch norm and moving averages update buffers, modules count their
calls. A repetition in backward must start from the state that the first forward saw, and must leave the state as the
forwards alone have made it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_MUTABLE = (list, dict, set, deque, Counter, OrderedDict)
_OWN = frozenset(vars(nn.Module()))
"""What every module has; of these only buffers are a forward's to change."""


class ChangesParameters(ValueError):
    """A block that is computed again in backward changes its parameters in forward."""


class ForwardState:
    """One call of a block: the state before it, as far as the call changed it."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name, self._modules = name, list(block.modules())
        self._absent = object()
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        """(where, key, value) of what the first forward changed; tensors and containers as copies."""

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first forward: notes what it changes."""
        versions = self._versions()
        before = [(place, key, value, _copy(value), _version(value)) for place, key, value in self._state()]
        known = {(id(place), key) for place, key, *_ in before}
        yield
        for name, version in self._versions().items():
            if version != versions.get(name, version):
                changed = name.partition(".")[2]
                raise ChangesParameters(
                    f"recompute: {self._name or 'the model'} changes its parameter {changed} in forward, and computing "
                    "it again in backward would change it twice; leave recompute out, or keep the value in a buffer"
                )
        for place, key, value, copy, version in before:
            # Also what was changed and changed back: a repetition may end halfway, when it has what backward needs.
            if place.get(key) is not value or _version(value) != version or _changed(value, copy):
                self._before.append((place, key, copy))
        for place, key, _ in self._state():
            if (id(place), key) not in known:
                self._before.append((place, key, self._absent))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a repetition: the state is that of the first forward, and afterwards what it is now."""
        after = [(place, key, place.get(key, self._absent)) for place, key, _ in self._before]
        alike: dict[int, Any] = {}
        for place, key, value in self._before:
            self._put(place, key, alike.setdefault(id(value), _copy(value)))
        try:
            yield
        finally:
            for place, key, value in after:
                self._put(place, key, value)

    def _put(self, place: dict[str, Any], key: str, value: Any) -> None:
        if value is self._absent:
            place.pop(key, None)
        else:
            place[key] = value

    def _state(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for module in self._modules:
            for key, value in module._buffers.items():
                if value is not None:
                    yield module._buffers, key, value
            own = vars(module)
            for key, value in own.items():
                if key not in _OWN and key != "forward":
                    yield own, key, value

    def _versions(self) -> dict[str, int]:
        return {
            f"{number}.{name}": param._version
            for number, module in enumerate(self._modules)
            for name, param in module._parameters.items()
            if param is not None
        }


def _copy(value: Any) -> Any:
    """A value that stays as it is when the original is changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.grad_fn is None else value
    return value.copy() if type(value) in _MUTABLE else value


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _changed(value: Any, copy: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # A comparison would wait for an accelerator, so there every buffer counts as changed.
        return value is not copy and (value.device.type != "cpu" or not _same_bits(value, copy))
    return type(value) in _MUTABLE and not _same_items(value, copy)


def _same_bits(value: torch.Tensor, copy: torch.Tensor) -> bool:
    return value.shape == copy.shape and (torch.equal(value, copy) or bool(((value == copy) | (value != value)).all()))


def _same_items(value: Any, copy: Any) -> bool:
    if len(value) != len(copy):
        return False
    if isinstance(value, dict):
        return all(key in copy and copy[key] is entry for key, entry in value.items())
    return all(a is b for a, b in zip(value, copy, strict=True)) if not isinstance(value, set) else value == copy
