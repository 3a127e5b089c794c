"""What is known of planes before a run: what ranks exchange, and where planes stay cut. Plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shoal.layout.spatial.grid import FULL, AxisCut, Move, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneEvent:
    """Something that ranks do together."""

    at: int
    """Its position in the forward."""
    module: str
    kind: Literal["move", "sum", "norm"]
    shape: tuple[int, ...]
    """Of the tensor: in full, of a sum its result, of a norm [rows]."""
    itemsize: int
    learns: bool
    """Whether a gradient comes back."""
    move: Move | None = None
    why: str = ""
    """The operation that asks for it."""

    def of_channels(self, ranks: int) -> PlaneEvent:
        """The same on ranks of tp that have part of the channels."""
        if self.kind == "norm" or len(self.shape) < 2:
            return self
        return replace(self, shape=(self.shape[0], self.shape[1] // ranks, *self.shape[2:]))

    def of_samples(self, before: int, now: int) -> PlaneEvent:
        """The same for another number of samples."""
        if self.kind == "norm":
            return replace(self, shape=(self.shape[0] // before * now,))
        shape = resized(self.shape, before, now)
        if self.move is None:
            return replace(self, shape=shape)
        needs = tuple(None if n is None else replace(n, cut=_wider(n.cut, self.shape, shape)) for n in self.move.needs)
        part = tuple(None if c is None else _wider(c, self.shape, shape) for c in self.move.part)
        move = Move(self.move.value, (needs[0], needs[1]), (part[0], part[1]))
        return replace(self, shape=shape, move=move)


def resized(shape: tuple[int, ...], before: int, now: int) -> tuple[int, ...]:
    exact = [n for n, size in enumerate(shape) if size == before]
    multiples = [n for n, size in enumerate(shape) if size and size % before == 0]
    place = next(iter(exact or multiples), None)
    return shape if place is None else (*shape[:place], shape[place] // before * now, *shape[place + 1 :])


def _wider(cut: AxisCut, before: tuple[int, ...], now: tuple[int, ...]) -> AxisCut:
    return replace(cut, outer=cut.outer * now[cut.dim] // before[cut.dim])


@dataclass(frozen=True, kw_only=True, slots=True)
class SpatialPlan:
    """How planes are cut."""

    sizes: tuple[int, int]
    events: tuple[PlaneEvent, ...]
    cut_share: float
    """The part of the model's products and convolutions that is computed on parts."""
    gathered: tuple[tuple[str, str], ...]
    """(module, operation) that needs all of a plane."""
    planes: tuple[tuple[str, tuple[int, ...]], ...]
    """Of each convolution that is computed in parts: its module and the size of its output plane."""
    modules: frozenset[str]
    """Those that compute on parts; "" is the loss."""
    whole: tuple[str, ...]
    """Convolutions that all ranks compute alike, since their planes are smaller than the ranks."""
    results: Mapping[tuple[str, int], tuple[Part, ...]] = field(default_factory=dict)
    """(module, number of its call) -> how what it returns is cut, laid flat."""
    arguments: Mapping[tuple[str, int], tuple[Part, ...]] = field(default_factory=dict)

    def crossing(
        self, paths: Sequence[str], piece: int, results: Sequence[tuple[int, int, int]], arguments: Sequence[int]
    ) -> Part:
        """How a tensor is cut that crosses to a piece of a pipeline."""
        if results:
            number, call, leaf = results[0]
            known, leaf = self.results.get((paths[number], call), ()), leaf
        else:
            known, leaf = self.arguments.get((paths[piece], 0), ()), arguments[0]
        return known[leaf] if leaf < len(known) else FULL
