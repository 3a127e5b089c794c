"""Test tensors for an optimiser: copies of a model's parameters, gradients for them, and the layouts in which ranks
would receive them: full, each alone, or concatenated and cut into slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoal.job.groups import Options

CUTS = (1, 7, 64, 1000, 1 << 18)
"""Lengths of slices, in turn; the last is the engine's longest."""
AT_THE_END = {3: 1e-10, 2: 1e10, 1: 1e10}
"""Factors on the gradients of the last steps."""


@dataclass(frozen=True)
class Copy:
    """A parameter as the probe sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    which: int
    """Its group."""
    options: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ProbeSlice:
    """A tensor that an optimiser is given: concatenated ranges of copies."""

    which: int
    shape: tuple[int, ...]
    sources: tuple[tuple[int, int, int], ...]
    """(copy, first element, end)."""
    attributes: dict[str, Any] = field(default_factory=dict)


Layout = list[list[ProbeSlice]]
"""For each rank, the tensors that its optimiser steps."""
Row = list[Tensor | None]
"""The gradients of one step, one for each copy."""


def copies_of(model: nn.Module, options: Options) -> list[Copy]:
    """The trainable parameters; of several with the same shape and options, the first and the last."""
    known: list[dict[str, Any]] = []
    kinds: dict[Any, list[Copy]] = {}
    order: dict[str, int] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        mine = dict(options(name, param))
        if mine not in known:
            known.append(mine)
        attributes = attributes_of(param)
        dtype = torch.complex128 if param.is_complex() else torch.float64
        copy = Copy(name, tuple(param.shape), dtype, known.index(mine), mine, attributes)
        order[name] = len(order)
        kind = kinds.setdefault((copy.shape, copy.dtype, copy.which, repr(sorted(attributes.items()))), [])
        if len(kind) == 2:
            kind.pop()
        kind.append(copy)
    return sorted((copy for kind in kinds.values() for copy in kind), key=lambda copy: order[copy.name])


def attributes_of(param: Tensor) -> dict[str, Any]:
    """Attributes that a model sets on its parameters for an optimiser to read."""
    return {key: value for key, value in vars(param).items() if not key.startswith("_")}


def shrunk(copy: Copy, most: int) -> Copy:
    shape = list(copy.shape)
    while prod(shape) > most:
        largest = shape.index(max(shape))
        shape[largest] = -(-shape[largest] // 2)
    return Copy(copy.name, tuple(shape), copy.dtype, copy.which, copy.options, copy.attributes)


def start_of(copy: Copy, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + place)
    return torch.randn(copy.numel, generator=generator, dtype=copy.dtype) * 0.5


def gradients(copies: Sequence[Copy], steps: int, *, absent: bool) -> list[Row]:
    """Magnitudes differ by up to 1e5 between parameters and by 300 within one, so that any normalisation shows. The
    last gradients are tiny, then huge, so that limits and thresholds show."""
    generator = torch.Generator().manual_seed(11)
    rows: list[Row] = []
    for step in range(steps):
        row: Row = []
        for place, copy in enumerate(copies):
            within = torch.linspace(0.01, 3.0, copy.numel, dtype=torch.float64)
            size = 10.0 ** ((place * 7 + step * 3) % 6 - 4) * AT_THE_END.get(steps - step, 1.0)
            gradient = torch.randn(copy.numel, generator=generator, dtype=copy.dtype) * within * size
            # Only the first has a gradient; then all but the first; then all are zero.
            if absent and ((step == 3 and place) or (step == 4 and not place and len(copies) > 1)):
                row.append(None)
            else:
                row.append(gradient * 0 if step == 6 and place % 2 == 0 else gradient)
        rows.append(row)
    return rows


def full(copies: Sequence[Copy]) -> Layout:
    return [[_whole(copy, place) for place, copy in enumerate(copies)]]


def alone(copies: Sequence[Copy]) -> Layout:
    return [[_whole(copy, place)] for place, copy in enumerate(copies)]


def _whole(copy: Copy, place: int) -> ProbeSlice:
    return ProbeSlice(copy.which, copy.shape, ((place, 0, copy.numel),), copy.attributes)


def sliced(copies: Sequence[Copy], rows: Sequence[Row]) -> Layout:
    """As the engine shards: parameters of one group concatenated from the last to the first, split between two ranks
    and into slices. A parameter that ever lacked a gradient is not fused with others."""
    skipped = {place for row in rows for place, gradient in enumerate(row) if gradient is None}
    runs: list[tuple[int, list[tuple[int, int, int]]]] = []
    ordered = sorted(range(len(copies)), key=lambda place: (copies[place].which, -place))
    middle, at = sum(copy.numel for copy in copies) * 9 // 20, 0
    ranks: list[list[tuple[int, list[tuple[int, int, int]]]]] = [[], []]
    for place in ordered:
        copy = copies[place]
        cut = min(max(middle - at, 0), copy.numel)
        for rank, (start, stop) in enumerate(((0, cut), (cut, copy.numel))):
            runs = ranks[rank]
            if start == stop:
                continue
            before = runs[-1] if runs else None
            joins = before is not None and before[0] == copy.which and before[1][-1][0] not in skipped
            if joins and place not in skipped:
                runs[-1][1].append((place, start, stop))
            else:
                runs.append((copy.which, [(place, start, stop)]))
        at += copy.numel
    return [[tensor for which, run in each for tensor in _chunks(which, run, copies)] for each in ranks]


def _chunks(which: int, run: list[tuple[int, int, int]], copies: Sequence[Copy]) -> Iterator[ProbeSlice]:
    total, at, turn = sum(stop - start for _, start, stop in run), 0, 0
    while at < total:
        end = min(at + CUTS[turn % len(CUTS)], total)
        sources, offset = [], 0
        for place, start, stop in run:
            low, high = max(at - offset, 0), min(end - offset, stop - start)
            if low < high:
                sources.append((place, start + low, start + high))
            offset += stop - start
        # A tensor has one dtype: complex parameters are never fused with others.
        for dtype in dict.fromkeys(copies[place].dtype for place, _, _ in sources):
            own = tuple(source for source in sources if copies[source[0]].dtype == dtype)
            yield ProbeSlice(which, (sum(stop - start for _, start, stop in own),), own)
        at, turn = end, turn + 1
