"""The optimiser on slices: any element-wise optimiser runs on this rank's part of the flat buffers.

The optimiser is given long flat tensors, one for each stretch of equal options, instead of the parameters; its
state is then sharded as they are. An optimiser that looks at a whole parameter at a time (LAMB, Muon) is given the
parameters themselves, which needs them whole: that is stage 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.parallel.data import Bucket

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Stretch:
    """A tensor the optimiser updates: elements [start, stop) of a bucket's buffer."""

    bucket: Bucket
    start: int
    stop: int
    param: nn.Parameter


@dataclass(frozen=True)
class Piece:
    """A range of one named parameter, and a tensor of values for just that range."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element, in the parameter laid out flat."""
    values: torch.Tensor


Numbers = dict[str, tuple[float, str]]
"""State key -> (value, its kind: int, float or a tensor's dtype)."""


class SavedState(Protocol):
    """What a checkpoint offers of the optimiser, by parameter name."""

    def keys(self, name: str) -> list[str]:
        """The element-wise state it holds for a parameter."""

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of that state, of the parameter laid out flat."""

    def numbers(self, name: str) -> Numbers: ...


class SlicedOptimizer:
    """Builds the optimiser over this rank's slices and maps its state back to named parameters."""

    def __init__(
        self,
        factory: Factory,
        options: Sequence[dict[str, Any]],
        buckets: Sequence[Bucket],
        masters: Sequence[torch.Tensor],
        offsets: Sequence[int],
        *,
        elementwise: bool,
        unused: frozenset[str],
    ) -> None:
        self.stretches: list[Stretch] = []
        self.unused = unused
        groups: list[dict[str, Any]] = [{"params": [], **dict(o)} for o in options]
        for bucket, master, offset in zip(buckets, masters, offsets, strict=True):
            if elementwise:
                ranges = bucket.buffer.runs(offset, offset + master.numel(), without=unused)
                for start, stop, which in ranges:
                    param = nn.Parameter(master[start - offset : stop - offset])
                    self.stretches.append(Stretch(bucket, start, stop, param))
                    groups[which]["params"].append(param)
            else:
                for slot in bucket.buffer.slots:
                    if slot.name not in unused:
                        self.stretches.append(Stretch(bucket, slot.start, slot.stop, slot.param))
                        groups[slot.options]["params"].append(slot.param)
        groups = [group for group in groups if group["params"]]
        if not groups:
            # A rank whose shard is all padding still steps, on nothing, so that schedules stay in step.
            groups = [{"params": [nn.Parameter(masters[0].new_zeros(0))]}]
        self.optimizer = factory(groups)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, *, gradients: dict[int, torch.Tensor], lr_factor: float) -> None:
        """`gradients`: by bucket identity, the reduced gradient of this rank's slice (offset as the masters)."""
        for stretch in self.stretches:
            offset = 0 if stretch.bucket.zero == 0 else stretch.bucket.buffer.shard.start
            gradient = gradients[id(stretch.bucket)][stretch.start - offset : stretch.stop - offset]
            stretch.param.grad = gradient.view(stretch.param.shape)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            lr = group["lr"]
            if isinstance(lr, torch.Tensor):
                lr.fill_(float(base) * lr_factor)
            else:
                group["lr"] = base * lr_factor
        self.optimizer.step()
        for stretch in self.stretches:
            stretch.param.grad = None

    def state(self, owned: Callable[[Bucket], tuple[int, int]]) -> Iterator[tuple[str, Piece]]:
        """Element-wise state within the owned range of each bucket, as (state key, piece)."""
        for stretch in self.stretches:
            low, high = owned(stretch.bucket)
            for key, value in self.optimizer.state.get(stretch.param, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == stretch.param.numel():
                    for piece in self._pieces(stretch, value.reshape(-1), low, high):
                        yield key, piece

    def numbers(self) -> dict[str, Numbers]:
        """State that is one number for a whole tensor (Adam's step), by parameter name and key."""
        found: dict[str, Numbers] = {}
        for stretch in self.stretches:
            numbers: Numbers = {}
            for key, value in self.optimizer.state.get(stretch.param, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    numbers[key] = (float(value), str(value.dtype).removeprefix("torch."))
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    numbers[key] = (float(value), type(value).__name__)
            for piece in self._pieces(stretch, stretch.param.detach().reshape(-1)):
                found[piece.name] = numbers
        return found

    def load(self, saved: SavedState) -> None:
        """Fills the state of every slice from a checkpoint, however that one was sliced."""
        for stretch in self.stretches:
            pieces = list(self._pieces(stretch, stretch.param.detach().reshape(-1)))
            first = pieces[0].name
            state: dict[str, Any] = {}
            for key, (value, kind) in saved.numbers(first).items():
                if kind in ("int", "float"):
                    state[key] = int(value) if kind == "int" else value
                else:
                    state[key] = torch.tensor(value, dtype=getattr(torch, kind))
            for key in saved.keys(first):
                flat = torch.zeros(stretch.stop - stretch.start, dtype=stretch.param.dtype, device=stretch.param.device)
                for piece in pieces:
                    at = self._slot_start(stretch, piece.name) + piece.start - stretch.start
                    stop = piece.start + piece.values.numel()
                    flat[at : at + piece.values.numel()] = saved.read(piece.name, key, piece.start, stop)
                state[key] = flat.view(stretch.param.shape)
            if state:
                self.optimizer.state[stretch.param] = state

    def _slot_start(self, stretch: Stretch, name: str) -> int:
        return next(slot.start for slot in stretch.bucket.buffer.slots if slot.name == name)

    def _pieces(
        self, stretch: Stretch, flat: torch.Tensor, low: int = 0, high: int | None = None
    ) -> Iterator[Piece]:
        low, high = max(low, stretch.start), stretch.stop if high is None else min(high, stretch.stop)
        for slot in stretch.bucket.buffer.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop and slot.name not in self.unused:
                values = flat[start - stretch.start : stop - stretch.start]
                yield Piece(slot.name, tuple(slot.shape), start - slot.start, values)
