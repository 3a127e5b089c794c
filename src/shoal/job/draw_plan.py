"""Which numbers one draw gets: how a tensor of random numbers is assembled from those of the full tensor.

A draw belongs to samples, to the step or, if no rule applies, to the rank. Each sample has its own numbers for the full
tensor; a rank that holds part of the tensor (tp, cp, spatial) takes its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from shoal.common.numbers import even_part
from shoal.job.draw_places import Drawn, Place
from shoal.job.draw_rules import Numbers, key_of


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How the ranks of tp, cp and spatial cut activations: sizes, this rank's indices, positions of a cut sequence."""

    tensor: int = 1
    tensor_index: int = 0
    context: int = 1
    context_index: int = 0
    length: int = 0
    """Length of the full sequence under cp."""
    positions: Callable[[int], np.ndarray] | None = None
    """Full size of a dimension that cp splits -> this rank's positions."""
    planes: tuple[tuple[int, int], ...] = ()
    """Under spatial: ranks along the height and along the width, and this rank's place among them."""
    salt: tuple[int, ...] = ()
    """Salt for draws without a rule: different on ranks that hold different stages or positions."""

    @property
    def ranks(self) -> int:
        """Those that cut activations."""
        return self.tensor * self.context * prod(ranks for ranks, _ in self.planes)

    def parts(self, full: Sequence[int], local: Sequence[int]) -> tuple[np.ndarray | None, ...] | None:
        """For each dimension the indices this rank holds (None: all of them). None instead if the sizes do not fit."""
        if len(full) != len(local):
            return None
        found: list[np.ndarray | None] = []
        sequence_done = False
        planes = list(self.planes)
        for size, mine in zip(full, local, strict=True):
            if size == mine:
                found.append(None)
                continue
            part = None
            while planes and part is None:
                part = _of_plane(size, mine, *planes.pop(0))
            if part is not None:
                found.append(part)
                continue
            if not mine or size % mine:
                return None
            ratio = size // mine
            by_context = ratio == self.context and (self.context != self.tensor or size == self.length)
            if by_context and not (sequence_done and self.context == self.tensor):
                sequence_done = sequence_done or size == self.length
                found.append(self._positions(size))
            elif ratio == self.tensor:
                found.append(np.arange(size)[self.tensor_index * mine : (self.tensor_index + 1) * mine])
            elif ratio == self.tensor * self.context and self.context > 1:
                found.append(self._twice(size, mine))
            else:
                return None
        return tuple(found)

    def _positions(self, size: int) -> np.ndarray:
        assert self.positions is not None
        return self.positions(size)

    def _twice(self, size: int, mine: int) -> np.ndarray:
        """A dimension that is split twice. Positions: cp first, then tp. Heads: tp first, then Ulysses."""
        if size == self.length:
            return self._positions(size)[self.tensor_index * mine : (self.tensor_index + 1) * mine]
        start = (self.tensor_index * self.context + self.context_index) * mine
        return np.arange(start, start + mine)


def _of_plane(size: int, mine: int, ranks: int, place: int) -> np.ndarray | None:
    """The rows of a plane that a rank holds of a dimension of this size, if they are so many."""
    start, stop = even_part(size, ranks, place)
    return np.arange(start, stop) if 1 < ranks <= size and stop - start == mine else None


@dataclass
class DrawnSamples:
    """The samples that one call of the model draws for."""

    samples: tuple[int, ...]
    """Counters of the samples, in the order of the batch."""
    gathered: tuple[int, ...]
    """The same inside regions that gather samples from several ranks."""
    step: int
    """Counter of the step's first sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawPlan:
    """How the numbers of one tensor are assembled."""

    kind: str
    """"sample", "step" or, where no rule applies, "rank"."""
    dim: int = 0
    gathered: bool = False
    full: tuple[int, ...] = ()
    parts: tuple[np.ndarray | None, ...] = ()


class PlacedNumbers:
    """The numbers of a draw, as a function of seed, place and samples."""

    def __init__(self, seed: int, cuts: Cuts) -> None:
        self.seed, self.cuts = seed, cuts
        self._numbers = Numbers()

    def guess(self, forward: DrawnSamples, shape: tuple[int, ...]) -> Drawn | None:
        """For a place that no earlier call of the model used. Without cuts the local shape is the full shape."""
        if self.cuts.ranks > 1 or not forward.samples:
            return None
        if shape and shape[0] % len(forward.samples) == 0:
            return Drawn(dim=0, full=(shape[0] // len(forward.samples), *shape[1:]))
        return Drawn(dim=None, full=shape)

    def fitted(self, known: Drawn, forward: DrawnSamples, shape: tuple[int, ...], *, lenient: bool) -> DrawPlan | None:
        """`lenient`: lengths may differ from those seen in the probe calls, in dimensions that are not cut."""
        if known.varies:
            return None
        if known.dim is None:
            parts = self.cuts.parts(known.full, shape)
            return None if parts is None else DrawPlan(kind="step", full=_full(known.full, shape, parts), parts=parts)
        dim = known.dim if known.dim < len(shape) else 0
        for samples, gathered in ((forward.samples, False), (forward.gathered, True)):
            if not samples or not shape or shape[dim] % len(samples):
                continue
            local = _of_one((shape[dim] // len(samples), *shape[:dim], *shape[dim + 1 :]))
            full = _of_one(known.full)
            parts = self.cuts.parts(full, local)
            if parts is None and lenient and self.cuts.ranks == 1 and len(full) == len(local):
                parts = (None,) * len(local)
            if parts is not None:
                uncut = _full(full, local, parts)
                return DrawPlan(kind="sample", dim=dim, gathered=gathered, full=uncut, parts=parts)
        return None

    def key(self, forward: DrawnSamples, place: Place, plan: DrawPlan) -> int:
        first = forward.samples[0] if forward.samples and plan.kind != "step" else forward.step
        held = [int(part[0]) if part is not None else 0 for part in plan.parts]
        salt = self.cuts.salt if plan.kind == "rank" else ()
        return key_of(self.seed, place.key, first, len(plan.kind), *held, *salt) >> 1

    def values(
        self, forward: DrawnSamples, place: Place, plan: DrawPlan, shape: tuple[int, ...], kind: str
    ) -> torch.Tensor:
        numbers = self._numbers
        if plan.kind == "rank":
            return torch.from_numpy(numbers.fill(kind, shape, place.key, self.key(forward, place, plan)))
        if plan.kind == "step":
            values = numbers.fill(kind, plan.full, place.key, key_of(self.seed, forward.step, -1))
            return torch.from_numpy(np.ascontiguousarray(_taken(values, plan.parts))).reshape(shape)
        samples = forward.gathered if plan.gathered else forward.samples
        cut = any(part is not None for part in plan.parts)
        local = tuple(size if part is None else len(part) for size, part in zip(plan.full, plan.parts, strict=True))
        together = numbers.empty(kind, (len(samples), *local))
        for row, sample in enumerate(samples):
            key = key_of(self.seed, sample)
            if cut:
                together[row] = _taken(numbers.fill(kind, plan.full, place.key, key), plan.parts)
            else:
                numbers.fill_into(kind, together[row, ...], place.key, key)
        rows = shape[plan.dim] // len(samples)
        others = (*shape[: plan.dim], *shape[plan.dim + 1 :])
        laid = torch.from_numpy(together).reshape(len(samples) * rows, *others)
        return laid.movedim(0, plan.dim) if plan.dim else laid


def _of_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one sample, which may have several rows."""
    return shape[1:] if shape[0] == 1 else shape


def _full(known: tuple[int, ...], local: tuple[int, ...], parts: tuple[np.ndarray | None, ...]) -> tuple[int, ...]:
    return tuple(k if part is not None else mine for k, mine, part in zip(known, local, parts, strict=True))


def _taken(values: np.ndarray, parts: tuple[np.ndarray | None, ...]) -> np.ndarray:
    for dim, part in enumerate(parts):
        if part is not None:
            values = values.take(part, axis=dim)
    return values
