"""What tensor parallelism should send in a model whose code looks at values, seen at the modules of its regions.

Which experts of a mixture are called, and with how many tokens, depends on the data; so the tensors that enter and
leave regions in such a model are not known before the step. They are observed here where the model calls the
projections at both ends of a region; what the projections themselves report about their collectives is not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from shoal.comm.ledger import BOOK
from shoal.estimate.axis_calls import gathered_at_entry, lies_between, sends_between
from shoal.estimate.held import Held
from shoal.estimate.tensor_traffic import crossing_calls
from shoal.estimate.traffic import Call
from shoal.layout.crossings import Crossing
from shoal.layout.tensor.plan import Region
from shoal.parallel.recompute import recomputing


class RegionsSeen:
    """Hooks on the projections of all regions of this rank."""

    def __init__(self, model: nn.Module, held: Held) -> None:
        self.group = held.placing.tensor.group
        self.crossings: Counter[Crossing] = Counter()
        for region in held.regions:
            _Ends(self, model, region, lies_between(held, region))

    def forget(self) -> None:
        self.crossings = Counter()

    def calls(self) -> Iterator[Call]:
        yield from crossing_calls(self.group, self.crossings)


class _Ends:
    """The projections of one region."""

    def __init__(self, seen: RegionsSeen, model: nn.Module, region: Region, between: str) -> None:
        self.seen = seen
        self.into, self.out = sends_between(between)
        self.times = 1 if between == "whole" else seen.group.ranks
        self._entered: list[tuple[TensorWeakRef, int]] = []
        by_entry = gathered_at_entry(region, between)
        for path in dict.fromkeys(region.columns):
            module = _there(model, path)
            if module is None:
                continue
            fused = isinstance(module, nn.MultiheadAttention)
            if not by_entry:
                module.register_forward_pre_hook(self._column(3 if fused else 1), with_kwargs=True)
            if fused:
                module.register_forward_hook(self._row)
        if by_entry and region.entry is not None:
            entry = self._entry(3 if between == "sequence" else 2)
            module = _there(model, region.entry)
            if module is not None:
                module.register_forward_pre_hook(entry, with_kwargs=True)
        for path in dict.fromkeys(region.rows):
            if path not in {f"{column}.out_proj" for column in region.columns}:
                module = _there(model, path)
                if module is not None:
                    module.register_forward_hook(self._row)

    def _column(self, num: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for x in _floats((args, kwargs), 1)[:num]:
                if not any(known() is x and version == _version(x) for known, version in self._entered):
                    self._entered.append((TensorWeakRef(x), _version(x)))
                    self._note(self.into, x, _working_itemsize(x))

        return hook

    def _entry(self, dims: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for x in _floats((args, kwargs), dims)[:1]:
                self._note(self.into, x, _working_itemsize(x))

        return hook

    def _row(self, _: nn.Module, args: Any, output: Any) -> None:
        self._entered = []
        for x in _floats(output, 1)[:1]:
            self._note(self.out, x, x.element_size())

    def _note(self, how: str, x: torch.Tensor, itemsize: int) -> None:
        if BOOK.phase != "evaluate":
            learns = torch.is_grad_enabled() and x.requires_grad
            size = self.times * x.numel() * itemsize
            self.seen.crossings[Crossing(how=how, whole_bytes=size, gradient=learns, again=recomputing())] += 1


def _there(model: nn.Module, path: str) -> nn.Module | None:
    """A module, unless it belongs to an expert of another rank."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _floats(tree: Any, dims: int) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() and leaf.dim() >= dims]


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _working_itemsize(x: torch.Tensor) -> int:
    """As autocast gives it to a product."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype == torch.float32:
        return torch.get_autocast_dtype(kind).itemsize
    return x.element_size()
