"""One round of islands: how far each has moved since the last one is summed over all of them.

What is sent is the move of an island times what it learned from; the sum of these counts travels at the same time, so
nothing has to be known about the others before a round begins, and a round can be on the wire while steps go on. An
island keeps its own move until the round is over: where another island is lost meanwhile, those that are left send
theirs again among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from shoal.comm.transport.link import PeerLost
from shoal.parallel.result import NOTHING_COUNTED, NonFinite
from shoal.parallel.sync.fragments import Portion

if TYPE_CHECKING:
    from shoal.parallel.sync.compressed import CompressedMoves
    from shoal.parallel.sync.outer import OuterLevel


class ArrivedMean(NamedTuple):
    """What a round brings."""

    mean: list[torch.Tensor]
    """Of the moves, one flat tensor for each bucket."""
    weight: float
    """Of this island in it."""
    stop: bool
    """Whether an island was asked to stop."""
    buffers: torch.Tensor | None
    """The mean of the islands' buffers, where they are exchanged."""


class OuterRound:
    """One fragment's round, as one rank sees it."""

    def __init__(
        self,
        level: OuterLevel,
        portion: Portion,
        moved: Callable[[], list[torch.Tensor]],
        *,
        count: float,
        stop: bool,
        buffers: bool = False,
        radial: bool = False,
        codec: CompressedMoves | None = None,
        number: int = 0,
    ) -> None:
        """`moved` gives this island's move anew whenever it is asked; `radial` and `buffers`: how moves are merged, and
        whether buffers are sent, too; `codec` compresses the fragment's round of this number."""
        self.level, self.portion, self.moved = level, portion, moved
        self.codec, self.number = codec, number
        self._before = [] if codec is None else codec.state()
        self.count, self.stop, self.buffers, self.radial = count, stop, buffers, radial
        self.works: list[Any] | None = None
        """On the wire; None where it has to be sent (again)."""
        self._sums: list[torch.Tensor] = []
        self._numbers = torch.zeros(0)
        self._buffers: torch.Tensor | None = None

    def send(self) -> None:
        """Puts it on the wire."""
        level = self.level
        self._sums = self.moved()
        lengths = Lengths(level, self.portion).of(self._sums) if self.radial else None
        if lengths is not None:
            Lengths(level, self.portion).divide(self._sums, lengths)
        if self.codec is None:
            for flat in self._sums:
                flat.mul_(self.count)
        self._buffers = level.joined_buffers().mul_(self.count) if self.buffers and level.buffers else None
        numbers = torch.tensor([self.count, float(self.stop), self.portion.apart], dtype=torch.float64)
        numbers = numbers.to(level.device)
        self._numbers = numbers if lengths is None else torch.cat([numbers, lengths * self.count])
        moves = self._sums if self.codec is None else []
        sent = [self._numbers, *moves, *([] if self._buffers is None else [self._buffers])]
        self.works = []
        group = level.islands.group
        if group is None:
            return
        try:
            self.works = [dist.all_reduce(flat, group=group, async_op=True) for flat in sent]
        except PeerLost:
            self.works = None  # Those that are left find out together, when they wait for it.

    def arrive(self) -> ArrivedMean:
        """Waits for it; raises PeerLost where it has to be sent again."""
        if self.works is None:
            self.send()
            if self.works is None:
                raise PeerLost(-1, "an island was lost before this round began")
        works, self.works = self.works, None
        for work in works:
            work.wait()
        total, stop, apart, *lengths = self._numbers.tolist()
        if not total:
            raise NonFinite(f"the loss is nan (sum 0 {NOTHING_COUNTED}")
        self.level.note_spread(apart, self.portion.views(self.level.masters))
        mean = self._sums
        if self.codec is not None:
            self.codec.restore(self._before)
            self.codec.total(mean, self.count / total, self.number)
        else:
            for flat in mean:
                flat.div_(total)
        if self.radial:
            merged = Lengths(self.level, self.portion)
            merged.divide(mean, merged.of(mean), torch.tensor(lengths, dtype=torch.float64) / total)
        own = self.moved()
        self.portion.apart = sum(
            float(torch.linalg.vector_norm(mine.sub_(flat))) ** 2 for mine, flat in zip(own, mean, strict=True)
        )
        buffers = None if self._buffers is None else self._buffers.div_(total)
        return ArrivedMean(mean, self.count / total, stop > 0, buffers)


class Lengths:
    """The norms of a fragment's tensors: of the full model's, so those of shards are summed over the island."""

    def __init__(self, level: OuterLevel, portion: Portion) -> None:
        self.level, self.names = level, portion.names
        self.places: list[tuple[int, int, int, int, int]] = []
        """(parameter, joined tensor, start, stop, ranks of an island that hold the same)."""
        number = {name: at for at, name in enumerate(portion.names)}
        joined = -1
        for bucket, ranges in zip(level.buckets, portion.ranges, strict=True):
            joined += bool(ranges)
            times, offset = level.placement.multiplicity(bucket.family), 0
            for low, high in ranges:
                for slot in bucket.buffer.slots:
                    start, stop = max(slot.start - bucket.offset, low), min(slot.stop - bucket.offset, high)
                    if start < stop:
                        at = number[slot.name]
                        self.places.append((at, joined, start - low + offset, stop - low + offset, times))
                offset += high - low

    def of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """One for each parameter of the fragment. Collective in the island."""
        squares = torch.zeros(len(self.names), dtype=torch.float64, device=self.level.device)
        for at, joined, start, stop, times in self.places:
            squares[at] += torch.linalg.vector_norm(values[joined][start:stop]).double() ** 2 / times
        if self.level.placement.norm.group is not None:
            dist.all_reduce(squares, group=self.level.placement.norm.group)
        return squares.sqrt()

    def divide(self, values: Sequence[torch.Tensor], lengths: torch.Tensor, new: torch.Tensor | None = None) -> None:
        """Gives every tensor the length 1, or a new one; what is zero stays so."""
        for at, joined, start, stop, _ in self.places:
            length = float(lengths[at])
            if length:
                values[joined][start:stop].mul_((1.0 if new is None else float(new[at])) / length)
