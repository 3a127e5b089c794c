"""Parameters laid end to end in one buffer, cut evenly into shards.

Everything that moves parameters, gradients or optimiser state moves slices of these buffers, so one collective
serves many tensors, shards are even whatever the shapes are, and a slice is always a range of a named tensor:
that is what makes checkpoints independent of the number of ranks.

    numel   elements of the parameters themselves
    padded  with each parameter aligned to ALIGN elements and the end filled up to a multiple of shards * ALIGN
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import nn

from shoal.job.on_disk import is_on_disk, leave_pages
from shoal.parallel.offload.level import MemoryLevel, Moving

Memory = Callable[[int, torch.dtype], torch.Tensor]

ALIGN = 16
"""Elements: 64 bytes of float32, a cache line, so that no kernel starts in the middle of one."""


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its buffer."""

    name: str
    param: nn.Parameter
    shape: torch.Size
    start: int
    options: int
    """Which set of optimiser options it has: equal numbers may share one optimiser tensor."""

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class FlatBuffer:
    """Some parameters of one dtype, their common storage, and this rank's shard of it."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter, int]],
        *,
        shards: int,
        index: int,
        memory: Memory | None = None,
        multiple: int = 1,
    ) -> None:
        """`memory` gives storage that several ranks share, of the given number of elements and type. It is complete
        once all of them have made their buffer, so they synchronise before the first read. Without it the buffer has
        its own. The full buffer can also be cut into `multiple` parts."""
        self.slots: list[Slot] = []
        start = 0
        # Parameters with equal options lie side by side, so that the optimiser sees few, long tensors.
        for name, param, options in sorted(params, key=lambda entry: entry[2]):
            self.slots.append(Slot(name, param, param.shape, start, options))
            start = _up(start + param.numel(), ALIGN)
        self.numel = sum(slot.shape.numel() for slot in self.slots)
        self.padded = _up(start, ALIGN * lcm(shards, multiple))
        self.shards = shards
        self.shard = slice(index * (self.padded // shards), (index + 1) * (self.padded // shards))
        first = self.slots[0].param
        self.dtype, self.device = first.dtype, first.device
        if memory is None:
            self.values = torch.zeros(self.padded, dtype=self.dtype, device=self.device)
        else:
            self.values = memory(self.padded, self.dtype)
        self.views = [self.values[s.start : s.stop].view(s.shape) for s in self.slots]
        # Where ranks share the storage, each writes its own shard only: what a late rank wrote into the others' would
        # undo what they have done since.
        mine = slice(0, self.padded) if memory is None else self.shard
        for slot in self.slots:
            start, stop = max(slot.start, mine.start), min(slot.stop, mine.stop)
            if start < stop:
                values = slot.param.data.reshape(-1)
                self.values[start:stop] = values[start - slot.start : stop - slot.start]
                if is_on_disk(slot.param):
                    leave_pages()
        self.attach()

    @property
    def bytes(self) -> int:
        return self.padded * self.values.element_size()

    def attach(self) -> None:
        """Makes every parameter a view of the buffer."""
        for slot, view in zip(self.slots, self.views, strict=True):
            slot.param.data = view

    def views_of(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[s.start : s.stop].view(s.shape) for s in self.slots]

    def runs(self, start: int, stop: int, *, unfused: frozenset[str] = frozenset()) -> list[tuple[int, int, int]]:
        """The range cut into the longest stretches of equal options, as (start, stop, options).

        Padding between parameters belongs to the stretch around it: it is zero, its gradient is zero, and an
        element-wise optimiser leaves it so. Parameters in `unfused` have a stretch of their own.
        """
        found: list[tuple[int, int, int]] = []
        before: Slot | None = None
        for slot in self.slots:
            low, high = max(slot.start, start), min(slot.stop, stop)
            if low < high:
                joins = before is not None and before.options == slot.options
                if joins and slot.name not in unfused and before.name not in unfused:  # type: ignore[union-attr]
                    found[-1] = (found[-1][0], high, slot.options)
                else:
                    found.append((low, high, slot.options))
                before = slot
        return found


class StoredShard:
    """A flat buffer of which only this rank's shard is kept; the full one exists while it is in use (ZeRO-3)."""

    def __init__(self, buffer: FlatBuffer, level: MemoryLevel | None = None) -> None:
        """`level`: where the shard waits, if not in memory."""
        self.buffer, self.level = buffer, level
        shard = buffer.values[buffer.shard]
        self.nbytes = shard.numel() * shard.element_size()
        self.place = None if level is None else level.reserve(self.nbytes)
        if level is None or self.place is None:
            self.shard = shard.clone()
        else:
            self.place.write(0, shard.view(torch.uint8)).wait()
            self.shard = self.place.view(0, shard)
        self.gathered = True
        self._nbytes = buffer.values.untyped_storage().nbytes()
        self._coming: tuple[torch.Tensor, Moving] | None = None
        nothing = torch.full((), float("nan"), dtype=buffer.dtype, device=buffer.device)
        self._absent = [nothing.expand(slot.shape) for slot in buffer.slots]
        self.free()

    def expect(self) -> None:
        """Starts to read a shard that is offloaded: it is asked for soon."""
        if self.level is not None and self.place is not None and self._coming is None and not self.gathered:
            into = torch.empty(self.nbytes, dtype=torch.uint8, device=self.buffer.device)
            self._coming = into, self.place.read(0, into)

    def read_into(self, full: torch.Tensor) -> Moving | None:
        """Starts to fill the full buffer, where this rank holds all of it at the level below."""
        if self.level is None or self.place is None:
            return None
        return self.place.read(0, full.view(torch.uint8))

    def here(self) -> torch.Tensor:
        """The shard in memory."""
        if self.level is None:
            return self.shard
        self.expect()
        assert self._coming is not None
        (values, moving), self._coming = self._coming, None
        self.level.wait(moving)
        return values.view(self.buffer.dtype)

    def forget(self) -> None:
        """What was expected and not asked for is out of date."""
        if self._coming is not None:
            self._coming[1].wait()
            self._coming = None

    def allocate(self) -> torch.Tensor:
        """Room for the full buffer. Views that autograd saved see the storage come back under them."""
        self.buffer.values.untyped_storage().resize_(self._nbytes)
        return self.buffer.values

    def use(self) -> None:
        self.buffer.attach()
        self.gathered = True

    def free(self) -> None:
        # A NaN of the same shape in place of the parameter: its size can still be asked, but a use outside the unit
        # ends in a loss of NaN, never in a plausible number or a read of freed memory.
        for slot, absent in zip(self.buffer.slots, self._absent, strict=True):
            slot.param.data = absent
        self.buffer.values.untyped_storage().resize_(0)
        self.gathered = False
