"""Ranges of named parameters: what the optimiser updates, what checkpoints hold, and how one maps to the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.job.kept import Common, exact
from shoal.parallel.bucket import Bucket
from shoal.parallel.flat import Slot


@dataclass(frozen=True)
class Piece:
    """A range of one named parameter, and a tensor of values for just that range."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element, in the parameter laid out flat."""
    values: torch.Tensor
    full: bool = False
    """Whether it is a range of the full parameter, where ranks hold parts of it."""


def pieces_within(bucket: Bucket, flat: torch.Tensor, offset: int, low: int, high: int) -> Iterator[Piece]:
    """The named ranges between `low` and `high` of a bucket's buffer; `flat` holds values from `offset` on."""
    low, high = max(low, offset), min(high, offset + flat.numel())
    for slot in bucket.buffer.slots:
        start, stop = max(slot.start, low), min(slot.stop, high)
        if start < stop:
            yield Piece(slot.name, tuple(slot.shape), start - slot.start, flat[start - offset : stop - offset])


@dataclass(frozen=True)
class FlatSlice:
    """A tensor the optimiser updates: elements [start, stop) of a bucket's buffer."""

    bucket: Bucket
    start: int
    stop: int
    param: nn.Parameter
    first: str
    """Name of the first parameter in it; of the only one, if that is unfused."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def pieces(self, flat: torch.Tensor | None = None, low: int = 0, high: int | None = None) -> Iterator[Piece]:
        """The named ranges in it, of values laid out as it is: its own, if none are given."""
        flat = self.param.detach().reshape(-1) if flat is None else flat
        high = self.stop if high is None else min(high, self.stop)
        yield from pieces_within(self.bucket, flat, self.start, max(low, self.start), high)

    def place_of(self, piece: Piece) -> int:
        """Where in it a piece begins."""
        slot = next(slot for slot in self.bucket.buffer.slots if slot.name == piece.name)
        return slot.start + piece.start - self.start

    def take_gradient(self, reduced: torch.Tensor) -> None:
        """`reduced`: the gradient of the bucket's master."""
        offset = self.bucket.offset
        self.param.grad = reduced[self.start - offset : self.stop - offset].view(self.param.shape)

    def follow_buffer(self) -> None:
        """The bucket's buffer lies elsewhere now."""
        self.param.data = self.bucket.buffer.values[self.start : self.stop].view(self.param.shape)

    def read(self, saved: SavedState, key: str, piece: Piece) -> torch.Tensor:
        """The state of a piece from a checkpoint."""
        return saved.read(piece.name, key, piece.start, piece.start + piece.values.numel())


@dataclass(frozen=True)
class OwnedSlice:
    """A full parameter of which ranks hold pieces, on the rank that updates it (`full_parameters.py`)."""

    bucket: Bucket
    """That of this rank's own piece."""
    param: nn.Parameter
    slot: Slot

    @property
    def first(self) -> str:
        return self.slot.name

    @property
    def size(self) -> int:
        return self.param.numel()

    def pieces(self, flat: torch.Tensor | None = None, low: int = 0, high: int | None = None) -> Iterator[Piece]:
        """All of it, if the range of the bucket holds the first element of this rank's shard: of the ranks that own the
        same, one writes that."""
        at = self.bucket.buffer.shard.start
        if low <= at and (high is None or at < high):
            flat = self.param.detach().reshape(-1) if flat is None else flat
            yield Piece(self.slot.name, tuple(self.param.shape), 0, flat, full=True)

    def place_of(self, piece: Piece) -> int:
        return 0

    def take_gradient(self, reduced: torch.Tensor) -> None:
        """It has it already (`FullParameters.collect`)."""

    def follow_buffer(self) -> None:
        """Its values come with every step."""

    def read(self, saved: SavedState, key: str, piece: Piece) -> torch.Tensor:
        return saved.read_full(piece.name, key, piece.start, piece.start + piece.values.numel())


class SavedState(Protocol):
    """What a checkpoint offers of the optimiser, by parameter name."""

    def keys(self, name: str) -> list[str]:
        """The element-wise state it holds for a parameter."""

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of that state, of this rank's part of the parameter laid out flat."""

    def read_full(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """The same of the full parameter."""

    def values(self, name: str) -> dict[str, Any]:
        """What else it holds for a parameter: numbers, text, lists, tensors of other shapes."""

    def common(self) -> Common:
        """What it holds for several parameters together."""


class HeldState:
    """A SavedState in memory. Each rank finds in it just the slices it holds."""

    def __init__(self, values: dict[str, dict[str, Any]], state: Iterable[tuple[str, Piece]]) -> None:
        self._values = values
        self._held: dict[str, dict[str, list[Piece]]] = {}
        for key, piece in state:
            self._held.setdefault(piece.name, {}).setdefault(key, []).append(piece)

    def keys(self, name: str) -> list[str]:
        return list(self._held.get(name, ()))

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Pieces follow each other without a gap: they are those of one shard."""
        pieces = self._held[name][key]
        low = pieces[0].start
        values = torch.cat([piece.values for piece in pieces]) if len(pieces) > 1 else pieces[0].values
        return values[start - low : stop - low]

    read_full = read

    def values(self, name: str) -> dict[str, Any]:
        return self._values.get(name, {})

    def common(self) -> Common:
        return {}


def unlike_the_rest(saved: SavedState, names: Iterable[str]) -> frozenset[str]:
    """Parameters whose saved state has a history of its own (another number of steps, or none at all), and those that
    had tensors of their own."""
    kinds = {name: (exact(saved.values(name)), tuple(sorted(saved.keys(name)))) for name in names}
    if not kinds:
        return frozenset()
    usual, _ = Counter(kinds.values()).most_common(1)[0]
    known = frozenset(saved.common().get("slices", {}).get("apart", ()))
    return known | frozenset(name for name, kind in kinds.items() if kind != usual)
