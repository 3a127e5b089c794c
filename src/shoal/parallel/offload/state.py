"""Offloaded optimiser state: a step reads it, updates and writes it back part by part.

    read part 2      read part 3      ...        one thread
    update part 1    update part 2    ...        this thread
                     write part 1     ...        one thread

Gradients stay where they are, so the norm over all of them, by which they are clipped, is known before the first part
is read. Parts share three buffers in turn. Between steps a state tensor is what lies at the level below, so that
checkpoints, proofs and regrouping read it as any other tensor. What the optimiser makes in its first step is taken over
after each part; numbers such as Adam's step stay in memory. The parameters of a part travel with its state where they
are offloaded too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.job.kept import state_of
from shoal.parallel.flat_slice import FlatSlice, OwnedSlice
from shoal.parallel.offload.level import LowerRange, MemoryLevel, Moving

if TYPE_CHECKING:
    from shoal.parallel.optimizer import SlicedOptimizer

BUFFERS = 3
"""One is read into, one is updated, one is written from."""
LEAST = 256
"""Bytes of a state tensor that is worth moving."""
ALIGN = 64


@dataclass
class _Kept:
    """One tensor of a part, and where it lies below."""

    tensor: torch.Tensor
    place: LowerRange
    offset: int

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def rest(self) -> None:
        """The tensor is what lies below."""
        self.tensor.data = self.place.view(self.offset, self.tensor)


@dataclass
class _Part:
    """Slices that are updated together."""

    slices: list[FlatSlice | OwnedSlice]
    place: LowerRange | None = None
    """Where their state lies, one tensor after the other."""
    state: dict[tuple[int, str], _Kept] = field(default_factory=dict)
    """Of a slice's number in the part and a key of its state."""
    values: list[_Kept] = field(default_factory=list)
    """Their parameters, where these are offloaded too."""

    @property
    def nbytes(self) -> int:
        size = self.place.nbytes if self.place is not None else 0
        return size + sum(_up(each.nbytes) for each in self.values)


class OffloadedState:
    """The state of one `SlicedOptimizer` at a level below."""

    def __init__(
        self, level: MemoryLevel, *, state: bool, elements: int, places: dict[int, LowerRange] | None = None
    ) -> None:
        """`state`: whether the optimiser's state is offloaded, or only parameters are; `elements`: how many a part has
        at least; `places`: of the buckets' masters, where these are offloaded."""
        self.level, self._state, self.elements, self.places = level, state, elements, places or {}
        self.parts: list[_Part] = []
        self._buffers: list[torch.Tensor] = []
        self._writing: list[list[Moving]] = [[] for _ in range(BUFFERS)]

    def lay(self, slices: Sequence[FlatSlice | OwnedSlice]) -> None:
        """The optimiser has these slices from now on, whose state is in memory or not made yet."""
        self.settle()
        self.parts, size = [], 0
        for each in slices:
            if not self.parts or size + each.size > self.elements:
                self.parts.append(_Part([]))
                size = 0
            self.parts[-1].slices.append(each)
            size += each.size
            place = self.places.get(id(each.bucket))
            if place is not None and isinstance(each, FlatSlice):
                at = (each.start - each.bucket.offset) * each.param.element_size()
                self.parts[-1].values.append(_Kept(each.param, place, at))

    @property
    def held_bytes(self) -> int:
        """Of the state that lies below."""
        return sum(part.place.nbytes for part in self.parts if part.place is not None)

    @property
    def working_bytes(self) -> int:
        """Of the buffers that it moves through."""
        return sum(buffer.numel() for buffer in self._buffers)

    def step(self, optimizer: SlicedOptimizer, update: Callable[[], Any]) -> None:
        """One step on gradients that were given to all slices; `update` makes it for those that have one."""
        gradients = {id(each): each.param.grad for part in self.parts for each in part.slices}
        for part in self.parts:
            for each in part.slices:
                each.param.grad = None
        reading = self._fetch(0)
        for number, part in enumerate(self.parts):
            arrived, reading = reading, self._fetch(number + 1)
            for moving in arrived:
                self.level.wait(moving)
            self._use(number)
            for each in part.slices:
                each.param.grad = gradients[id(each)]
            with optimizer.only(part.slices):
                update()
            for each in part.slices:
                each.param.grad = None
            for placeholder in optimizer.placeholders.values():
                placeholder.grad = None  # It has counted once.
            self._put(number, optimizer.optimizer, values=True)
        if self.places:
            self.settle()  # The next forward reads the parameters.

    def take_over(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """The state of a part, which is in memory, goes to the level below."""
        self._put(number, optimizer, values=False)
        self.settle()

    def settle(self) -> None:
        """All that was written is there."""
        for writing in self._writing:
            while writing:
                self.level.wait(writing.pop())

    def _fetch(self, number: int) -> list[Moving]:
        """Starts to read a part into its buffer."""
        if number >= len(self.parts):
            return []
        part, buffer = self.parts[number], self._buffer(number)
        found = []
        if part.place is not None:
            found.append(part.place.read(0, buffer[: part.place.nbytes]))
        for each, at in self._values(part):
            found.append(each.place.read(each.offset, buffer[at : at + each.nbytes]))
        return found

    def _buffer(self, number: int) -> torch.Tensor:
        """The buffer of a part, from which nothing is written any more."""
        turn = number % BUFFERS
        while self._writing[turn]:
            self.level.wait(self._writing[turn].pop())
        size = max(part.nbytes for part in self.parts)
        if len(self._buffers) <= turn or self._buffers[turn].numel() < size:
            device = self.parts[0].slices[0].bucket.buffer.device
            self._buffers[turn : turn + 1] = [torch.empty(size, dtype=torch.uint8, device=device)]
        return self._buffers[turn]

    def _values(self, part: _Part) -> Iterator[tuple[_Kept, int]]:
        """The parameters of a part, and where in its buffer they lie."""
        at = part.place.nbytes if part.place is not None else 0
        for each in part.values:
            yield each, at
            at += _up(each.nbytes)

    def _use(self, number: int) -> None:
        """The tensors of a part are what was read."""
        part = self.parts[number]
        if part.nbytes == 0:
            return
        buffer = self._buffers[number % BUFFERS]
        for kept in part.state.values():
            kept.tensor.data = _typed(buffer, kept.offset, kept.tensor)
        for each, at in self._values(part):
            each.tensor.data = _typed(buffer, at, each.tensor)

    def _put(self, number: int, optimizer: torch.optim.Optimizer, *, values: bool) -> None:
        """What a part's tensors are now goes to the level below, and they rest there. `values`: its parameters too."""
        part, writing = self.parts[number], self._writing[number % BUFFERS]
        buffer = self._buffers[number % BUFFERS] if values and part.nbytes else None
        for each, at in self._values(part) if buffer is not None else ():
            assert buffer is not None
            writing.append(each.place.write(each.offset, buffer[at : at + each.nbytes]))
            each.rest()
        found = dict(self._now(part, optimizer)) if self._state else {}
        inside = (
            buffer is not None
            and found.keys() == part.state.keys()
            and all(
                value is part.state[key].tensor and value.data_ptr() == buffer.data_ptr() + part.state[key].offset
                for key, value in found.items()
            )
        )
        if inside and part.place is not None:
            assert buffer is not None
            writing.append(part.place.write(0, buffer[: part.place.nbytes]))
        elif found:
            self._lie(part, found)
            for key, value in found.items():
                kept, held = part.state[key], value.detach().contiguous()
                writing.append(kept.place.write(kept.offset, held.view(-1).view(torch.uint8)))
        for kept in part.state.values():
            kept.rest()

    def _now(self, part: _Part, optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for number, each in enumerate(part.slices):
            for key, value in state_of(optimizer, each.param).items():
                plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
                if plain and value.dim() and value.numel() * value.element_size() >= LEAST:
                    yield (number, key), value

    def _lie(self, part: _Part, found: dict[tuple[int, str], torch.Tensor]) -> None:
        """Each tensor's place: where it was, or a new one if their sizes are others than before."""
        sizes = {key: value.numel() * value.element_size() for key, value in found.items()}
        if {key: kept.nbytes for key, kept in part.state.items()} == sizes:
            before = part.state
            part.state = {key: _Kept(value, before[key].place, before[key].offset) for key, value in found.items()}
            return
        total = sum(map(_up, sizes.values()))
        if part.place is None or part.place.nbytes != total:
            part.place = self.level.reserve(total)
        at = 0
        part.state = {}
        for key, value in found.items():
            part.state[key] = _Kept(value, part.place, at)
            at += _up(sizes[key])


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _typed(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A range of a buffer of bytes as a tensor of the type and shape of another."""
    nbytes = like.numel() * like.element_size()
    return buffer[offset : offset + nbytes].view(like.dtype).view(like.shape)
