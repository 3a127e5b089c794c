"""Calls a part of the model again with other sizes, on fake tensors, to check that its code adapts.

A model's own code may name sizes: `view(B, L, self.num_heads, ...)`, `split(self.split_size)`. With a part of the
heads these attributes, or the sizes in the calls themselves, must be divided as well. Which ones is found by trying:
the call must succeed, and every operation in it must have the expected shapes. Sizes are multiplied rather than
divided: with twice the heads no dimension becomes 1, which libraries treat differently.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.layout.cuts import Cut
from shoal.layout.recorded import Op, Ref, TracedCall
from shoal.layout.tensor.dims import bind
from shoal.layout.tensor.resized import Rehearsed
from shoal.layout.tensor.segments import slice_range
from shoal.layout.tensor.spread import Graph

Attribute = tuple[str, str]
"""(module path, attribute), the latter possibly "config.num_heads"."""

LAYOUT_ONLY = frozenset("clone view _unsafe_view _reshape_alias reshape detach alias expand contiguous empty".split())
"""Ignored: whether a reshape copies depends on strides, which may differ between a part and the full tensor."""


@dataclass(frozen=True, slots=True)
class ReplayedOp:
    """The compared properties of an operation."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    numbers: tuple[Any, ...] = ()
    free: bool = False
    """Whether its result is never read, so that it need not agree."""

    def agrees(self, got: ReplayedOp) -> bool:
        return got.name == self.name and (self.free or (got.shapes == self.shapes and got.numbers == self.numbers))


class _Steps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[ReplayedOp] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        if outputs and name not in LAYOUT_ONLY:
            start = None
            if name == "slice":
                begin, size = (args[2] if len(args) > 2 else 0), args[0].shape[args[1] if len(args) > 1 else 0]
                start = slice(begin, None).indices(size)[0]
            shapes = tuple(tuple(int(size) for size in leaf.shape) for leaf in outputs)
            self.found.append(ReplayedOp(name, shapes, _numbers(func, args, start)))
        return result


def _numbers(func: Any, args: Any, start: int | None) -> tuple[Any, ...]:
    """Numbers that are not sizes and must be unchanged: factors, exponents, the start of a slice."""
    if start is not None:
        return (start,)
    if torch.Tag.pointwise in func.tags:
        return tuple(leaf for leaf in args if isinstance(leaf, (int, float)))
    return tuple(leaf for leaf in args if isinstance(leaf, float))


def expected(graph: Graph, call: TracedCall, cuts: Mapping[int, Cut], times: int) -> list[ReplayedOp]:
    """What the call's operations should return with all split dimensions `times` as large."""

    def local(value: int) -> tuple[int, ...]:
        shape, cut = graph.values[value].shape, cuts.get(value)
        return shape if cut is None else (*shape[: cut.dim], shape[cut.dim] * times, *shape[cut.dim + 1 :])

    steps = []
    for op in graph.ops[call.first : call.stop]:
        if op.name not in LAYOUT_ONLY and not graph.live[op.number]:
            steps.append(ReplayedOp(op.name, free=True))
        elif op.name not in LAYOUT_ONLY:
            start = _start(op, graph, cuts, times) if op.name == "slice" else None
            steps.append(
                ReplayedOp(op.name, tuple(local(v) for v in op.outputs), _numbers(op.overload, op.args, start))
            )
    return steps


def _start(op: Op, graph: Graph, cuts: Mapping[int, Cut], times: int) -> int:
    at, start, _, step = slice_range(bind(op, graph.values))
    cut = cuts.get(op.inputs[0])
    return start * times if cut is not None and cut.dim == at and step == 1 else start


class Replay:
    """One call of a module, to be made again with other sizes."""

    def __init__(self, graph: Graph, call: TracedCall, modules: dict[str, nn.Module]) -> None:
        self.graph = graph
        self.call = call
        self.module = modules[call.path]
        self.modules = modules
        held = [p for p in graph.trace.model.parameters() if isinstance(p, FakeTensor)]
        self.mode: FakeTensorMode = held[0].fake_mode if held else FakeTensorMode(allow_non_fake_inputs=True)
        self._names: dict[int, str] = {}
        for found in (graph.trace.model.named_parameters(), graph.trace.model.named_buffers()):
            self._names.update({id(tensor): name for name, tensor in found})

    def progress(
        self, cuts: Mapping[int, Cut], times: int, scaled: tuple[Attribute, ...], resized: Rehearsed | None = None
    ) -> tuple[int, bool]:
        """How many operations agreed, and whether all did. `resized`: also changes sizes in calls, and records the
        changes."""
        wanted = expected(self.graph, self.call, cuts, times)
        found, finished = self._run(cuts, times, scaled, resized)
        same = 0
        for got, want in zip(found, wanted, strict=False):
            if not want.agrees(got):
                break
            same += 1
        resizes = resized is None or not resized.wrong
        return same, finished and resizes and same == len(wanted) == len(found)

    def runs_in_evaluation(
        self, cuts: Mapping[int, Cut], times: int, scaled: tuple[Attribute, ...], resized: Rehearsed
    ) -> bool:
        """Whether the code also runs in evaluation mode, where its operations may differ."""
        return self._run(cuts, times, scaled, resized, training=False)[1] and not resized.wrong

    def _run(
        self,
        cuts: Mapping[int, Cut],
        times: int,
        scaled: tuple[Attribute, ...],
        resized: Rehearsed | None,
        *,
        training: bool = True,
    ) -> tuple[list[ReplayedOp], bool]:
        steps = _Steps()
        by_name = {self.graph.values[v].name: cut for v, cut in cuts.items() if self.graph.values[v].name}
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(_quiet())
            stack.enter_context(self.mode)
            stack.enter_context(self._resized(by_name, times))
            stack.enter_context(with_sizes(self.modules, scaled, lambda size: size * times))
            if resized is not None:
                stack.enter_context(resized.installed(self.modules))
            if not training:
                self.module.eval()
            args, kwargs = tree_map(lambda leaf: self._fake(leaf, cuts, times), self.call.inputs)
            stack.enter_context(steps)
            try:
                self.module(*args, **kwargs)
            except Exception:
                return steps.found, False
        return steps.found, True

    def _fake(self, leaf: Any, cuts: Mapping[int, Cut], times: int) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        value = self.graph.values[leaf.value]
        made = torch.empty_strided(value.shape, value.strides, dtype=value.dtype)
        if (cut := cuts.get(leaf.value)) is not None:
            made = torch.cat([made] * times, cut.dim)
        return made.requires_grad_() if value.learned and value.dtype.is_floating_point else made

    @contextmanager
    def _resized(self, cuts: Mapping[str, Cut], times: int) -> Iterator[None]:
        """Replaces all parameters and buffers of the module by fakes, larger where they are split."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        made: dict[int, Any] = {}
        # Code may cache what it computes (a mask, a table of angles); a fake must not remain in the cache.
        attributes = [(module, dict(vars(module))) for module in self.module.modules()]
        for module in self.module.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    before.append((held, name, tensor))
                    if id(tensor) not in made:
                        made[id(tensor)] = self._larger(tensor, cuts.get(self._names.get(id(tensor), "")), times)
                    held[name] = made[id(tensor)]
        try:
            yield
        finally:
            for module, held in attributes:
                vars(module).clear()
                vars(module).update(held)
            for held, name, tensor in before:
                held[name] = tensor

    def _larger(self, tensor: torch.Tensor, cut: Cut | None, times: int) -> Any:
        shape = [int(size) for size in tensor.shape]
        if cut is not None:
            shape[cut.dim] *= times
        fake = torch.empty(shape, dtype=tensor.dtype)
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses PyTorch's log of failures on fakes: here a failure is an expected result."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def divided(modules: dict[str, nn.Module], scaled: tuple[Attribute, ...], degree: int) -> AbstractContextManager[None]:
    """With attributes divided by `degree`, as on a rank."""
    return with_sizes(modules, scaled, lambda size: size // degree)


@contextmanager
def with_sizes(
    modules: dict[str, nn.Module], scaled: tuple[Attribute, ...], change: Callable[[int], int]
) -> Iterator[None]:
    """With attributes changed; a config is copied first, so that other modules do not see the change."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for path, attribute in scaled:
            module = modules[path]
            held, _, name = attribute.rpartition(".")
            if held:
                config = getattr(module, held)
                if not any(m is module and n == held for m, n, _ in before):
                    before.append((module, held, config))
                    config = copy.copy(config)
                    setattr(module, held, config)
                setattr(config, name, change(getattr(config, name)))
            else:
                before.append((module, name, getattr(module, name)))
                setattr(module, name, change(getattr(module, name)))
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)
