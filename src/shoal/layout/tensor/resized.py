"""While a module's code runs, full sizes that it names are replaced by those of a part.

The trace identifies these calls: the n-th call that names sizes, in the module's own code, not in modules that it
calls. A function mode intercepts them, only while the module runs. A rehearsal finds out which of them name the full
size and makes them larger; a rank of tensor parallelism divides them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.layout.cuts import Cut
from shoal.layout.recorded import TracedCall
from shoal.layout.tensor.plan import ResizedView
from shoal.layout.tensor.sized_calls import NotedCall, SizedCall, places, read
from shoal.layout.tensor.spread import Graph

Key = tuple[str, int]
"""(module path, order)."""


class _Running(threading.local):
    def __init__(self) -> None:
        self.modes: list[ResizingMode] = []


_running = _Running()


class ResizingMode(TorchFunctionMode):
    """Counts the sized calls in one call of a module, and makes some of them with other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def sizes_for(self, order: int, call: SizedCall) -> tuple[int, ...] | None:
        """Other sizes for a call; None: unchanged."""
        return None

    def made(self, order: int, result: Any) -> None:
        """Called with the result of a call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = read(func, args, kwargs)
        if call is None or not self._is_own():
            return func(*args, **kwargs)
        order, self.count = self.count, self.count + 1
        sizes = self.sizes_for(order, call)
        result = func(*args, **kwargs) if sizes is None else call.again(sizes)
        self.made(order, result)
        return result

    def _is_own(self) -> bool:
        """Whether the module's own code makes the call, not a module it calls (or a hook there). Decided by the stack
        of frames, which is correct for modules of any kind and under recomputation."""
        if not _running.modes or _running.modes[-1] is not self:
            return False
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not _CALLED:
            if frame.f_code is _RUN:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def _run(mode: Callable[[], ResizingMode], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    now = mode()
    _running.modes.append(now)
    try:
        with now:
            return forward(*args, **kwargs)
    finally:
        _running.modes.pop()


_RUN = _run.__code__
_CALLED = nn.Module._call_impl.__code__


class _Divides(ResizingMode):
    """Divides the sizes of a plan's calls by the degree."""

    def __init__(self, views: Mapping[int, ResizedView], degree: int) -> None:
        super().__init__()
        self.views, self.degree = views, degree

    def sizes_for(self, order: int, call: SizedCall) -> tuple[int, ...] | None:
        view = self.views.get(order)
        if view is None:
            return None
        asked = call.asked()
        fits = call.function == view.function and len(call.sizes) == view.num_sizes
        fits = fits and all(call.sizes[place] % self.degree == 0 for place in view.places)
        if not fits or (asked is not None and asked[0] != asked[1] * self.degree):
            where = f"{view.module or 'the model'}: {call.function}{call.sizes} of {list(call.source.shape)}"
            raise ValueError(
                f"{where} should be divided among {self.degree} ranks, but does not name {self.degree} times the local "
                f"size, as {view.function} did here when the model was traced; its code takes another branch now, "
                "so declare the region's projections whole"
            )
        return tuple(size // self.degree if at in view.places else size for at, size in enumerate(call.sizes))


def divide_views(modules: Mapping[str, nn.Module], views: Iterable[ResizedView], degree: int) -> None:
    """Makes the modules' code compute on one part of `degree` from now on."""
    for path, of_module in by_module(views).items():
        module: Any = modules[path]
        module.forward = partial(_run, partial(_Divides, of_module, degree), module.forward)


def by_module(views: Iterable[ResizedView]) -> dict[str, dict[int, ResizedView]]:
    found: dict[str, dict[int, ResizedView]] = {}
    for view in views:
        found.setdefault(view.module, {})[view.order] = view
    return found


class Rehearsed:
    """The sized calls of one call of a module, as traced, and their results in a replay."""

    def __init__(
        self, graph: Graph, call: TracedCall, cuts: Mapping[int, Cut], times: int, only: frozenset[Key] | None = None
    ) -> None:
        """`only`: the calls to make with other sizes; None: find out which."""
        self.only, self.times = only, times
        self.changed: dict[Key, ResizedView] = {}
        self.made: list[tuple[Key, str]] = []
        """All calls, in order."""
        self.wrong = False
        self._traced: dict[str, dict[int, dict[int, tuple[NotedCall, tuple[int, ...], list[Any]]]]] = {}
        resizable = set()
        for noted in graph.trace.sized_calls:
            if not is_within(graph.trace.calls[noted.call], call):
                continue
            known = [cuts[v] for v in noted.results if v is not None and v in cuts]
            at = places(noted.function, noted.sizes, noted.dim, known) if len(known) == len(noted.results) else ()
            shapes = [None if v is None else _local(graph.values[v].shape, cuts.get(v), times) for v in noted.results]
            self._traced.setdefault(noted.module, {}).setdefault(noted.call, {})[noted.order] = (noted, at, shapes)
            if at:
                resizable.add(noted.module)
        self._traced = {path: calls for path, calls in self._traced.items() if path in resizable}
        self._calls_made = dict.fromkeys(self._traced, 0)

    @property
    def may_change(self) -> bool:
        return bool(self._traced)

    @contextmanager
    def installed(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        before: list[tuple[Any, bool, Any]] = []
        try:
            for path in self._traced:
                module: Any = modules[path]
                before.append((module, "forward" in vars(module), module.forward))
                module.forward = partial(_run, partial(self._mode, path), module.forward)
            yield
        finally:
            for module, was_own, forward in reversed(before):
                del module.forward
                if was_own:
                    module.forward = forward

    def _mode(self, path: str) -> ResizingMode:
        at = self._calls_made[path]
        self._calls_made[path] += 1
        calls = list(self._traced[path].values())
        if at >= len(calls):
            self.wrong = True
        return _Rehearses(self, path, calls[at] if at < len(calls) else {})

    def sizes_for(self, key: Key, call: SizedCall, noted: NotedCall, at: tuple[int, ...]) -> tuple[int, ...] | None:
        if (call.function, len(call.sizes), call.dim) != (noted.function, len(noted.sizes), noted.dim):
            self.wrong = True
            return None
        asks_for_whole = bool(at) and all(call.sizes[place] == noted.sizes[place] for place in at)
        wanted = asks_for_whole if self.only is None else key in self.only
        if not wanted:
            self.wrong |= key in self.changed
            return None
        view = ResizedView(module=key[0], order=key[1], function=call.function, num_sizes=len(call.sizes), places=at)
        # One module called twice must make the same call in the same way.
        self.wrong |= self.changed.setdefault(key, view) != view or not asks_for_whole
        return tuple(size * self.times if place in at else size for place, size in enumerate(call.sizes))


class _Rehearses(ResizingMode):
    def __init__(
        self, rehearsed: Rehearsed, path: str, traced: Mapping[int, tuple[NotedCall, tuple[int, ...], list[Any]]]
    ) -> None:
        super().__init__()
        self.rehearsed, self.path, self.traced = rehearsed, path, traced

    def sizes_for(self, order: int, call: SizedCall) -> tuple[int, ...] | None:
        key = (self.path, order)
        self.rehearsed.made.append((key, call.function))
        if order not in self.traced:
            self.rehearsed.wrong = True
            return None
        noted, at, _ = self.traced[order]
        return self.rehearsed.sizes_for(key, call, noted, at)

    def made(self, order: int, result: Any) -> None:
        if order in self.traced:
            shapes = [tuple(int(size) for size in leaf.shape) for leaf in tree_leaves(result) if _is_tensor(leaf)]
            wanted = self.traced[order][2]
            agree = len(shapes) == len(wanted) and all(
                want is None or want == got for want, got in zip(wanted, shapes, strict=True)
            )
            self.rehearsed.wrong |= not agree


def is_within(inner: TracedCall, outer: TracedCall) -> bool:
    return outer.first <= inner.first and inner.stop <= outer.stop


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _local(shape: tuple[int, ...], cut: Cut | None, times: int) -> tuple[int, ...]:
    return shape if cut is None else (*shape[: cut.dim], shape[cut.dim] * times, *shape[cut.dim + 1 :])
