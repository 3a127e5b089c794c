"""Compressed gradients: the level of dp that compresses sums them once a step, after the levels inside it have.

What is compressed is this rank's part of each bucket, parameter by parameter; small tensors, vectors and whatever a
method cannot make smaller go as they are, all of a bucket in one message, and so do the payloads of all its parameters.
A gradient is compressed as its rank's part of the global mean: the count may differ from step to step, and what is
kept of one step is added in the next. A parameter without a gradient on any rank is skipped; its residual is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shoal.comm.compress import traffic
from shoal.comm.compress.exchange import run
from shoal.comm.compress.given import Draw, Over, State
from shoal.comm.compress.method import Method
from shoal.comm.compress.sizes import matrix_of
from shoal.parallel.bucket import Bucket
from shoal.parallel.flat import Slot


@dataclass
class Fragment:
    """Elements [start, stop) of a parameter that this rank compresses, and what it has kept of them."""

    slot: Slot
    start: int
    stop: int
    shape: tuple[int, ...]
    state: State = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What its random numbers depend on."""
        return f"{self.slot.name}[{self.start}:{self.stop}]"

    def within(self, part: torch.Tensor, offset: int) -> torch.Tensor:
        """Its elements in a part of the buffer that starts at `offset`."""
        low = self.slot.start + self.start - offset
        return part[low : low + self.stop - self.start]


class Compression:
    """Sums the parts of all buckets over the level that compresses, and keeps what was not sent."""

    def __init__(self, buckets: Sequence[Bucket], method: Method, *, seed: int) -> None:
        self.buckets, self.method, self.seed = buckets, method, seed
        self.step = 0
        """Of training: draws and DGC's gentle start depend on it."""
        self.unused: frozenset[str] = frozenset()
        """Parameters that had no gradient in the last step."""
        self.fragments = {id(bucket): list(self._fragments(bucket)) for bucket in buckets}

    @property
    def undecided(self) -> frozenset[tuple[str, str]]:
        """Axis and kind of collectives whose sizes data alone decide."""
        if self.method.sent_bytes((traffic.SMALLEST, 2), 4, 2, 0) is not None:
            return frozenset()
        axes = {bucket.route.between.axis for bucket in self.buckets}
        return frozenset((axis, kind) for axis in axes for kind in ("all_gather", "all_to_all"))

    def reduce(self, count: float, unused: frozenset[str]) -> None:
        """The gradients of all buckets become the sums over all replicas. `count` makes sums into means."""
        self.unused = unused
        for bucket in self.buckets:
            part, offset = bucket.part_to_compress(), bucket.compressed.start
            self._reduce_small(bucket, part, offset)
            self._reduce_large(bucket, part, offset, count)
            bucket.after_compression()
        self.step += 1

    def _reduce_small(self, bucket: Bucket, part: torch.Tensor, offset: int) -> None:
        """What is not compressed, all of it in one message."""
        group = bucket.route.between.group
        rest = [part[low - offset : high - offset] for low, high in self.dense_ranges(bucket)]
        if group is not None and rest:
            joined = torch.cat(rest)
            dist.all_reduce(joined, group=group)
            for values, summed in zip(rest, joined.split([len(values) for values in rest]), strict=True):
                values.copy_(summed)

    def _reduce_large(self, bucket: Bucket, part: torch.Tensor, offset: int, count: float) -> None:
        over = over_of(bucket)
        fragments = self.sent(bucket)
        reductions = []
        for each in fragments:
            # A type of its own also where none is needed: `part` is written while others are still read.
            mean = each.within(part, offset).to(working_type(part.dtype), copy=True).div_(count).view(each.shape)
            draw = Draw(self.seed, self.step, each.key, over.rank)
            reductions.append(self.method.reduction(mean, each.state, over, draw))
        for each, total in zip(fragments, run(reductions, over), strict=True):
            each.within(part, offset).copy_(total.view(-1).mul_(count))

    def sent(self, bucket: Bucket) -> list[Fragment]:
        """The fragments of a bucket that take part in a step like the last one."""
        return [each for each in self.fragments[id(bucket)] if each.slot.name not in self.unused]

    def dense_ranges(self, bucket: Bucket) -> Iterator[tuple[int, int]]:
        """What of this rank's part of a bucket's buffer goes uncompressed."""
        part = bucket.compressed
        compressed = {each.slot.name: each for each in self.fragments[id(bucket)]}
        for slot in bucket.buffer.slots:
            low, high = max(slot.start, part.start), min(slot.stop, part.stop)
            each = compressed.get(slot.name)
            ranges = [(low, high)]
            if each is not None:
                ranges = [(low, slot.start + each.start), (slot.start + each.stop, high)]
            yield from (pair for pair in ranges if pair[0] < pair[1])

    def _fragments(self, bucket: Bucket) -> Iterator[Fragment]:
        part = bucket.compressed
        for slot in bucket.buffer.slots:
            low, high = max(slot.start, part.start) - slot.start, min(slot.stop, part.stop) - slot.start
            if low >= high or not self.pays(bucket, slot.shape):
                continue
            low, high, shape = self._body(slot, low, high)
            if low < high and self.pays(bucket, shape):
                yield Fragment(slot, low, high, shape)

    def _body(self, slot: Slot, low: int, high: int) -> tuple[int, int, tuple[int, ...]]:
        """What of a range of a parameter is compressed, and in which shape: some need whole rows of a matrix."""
        if (low, high) == (0, slot.shape.numel()):
            return low, high, tuple(slot.shape)
        if not self.method.term.whole_rows:
            return low, high, (1, high - low)
        _, columns = matrix_of(slot.shape)
        first, last = -(-low // columns), high // columns
        return first * columns, last * columns, (max(0, last - first), columns)

    def pays(self, bucket: Bucket, shape: Sequence[int]) -> bool:
        itemsize = working_type(bucket.buffer.dtype).itemsize
        return self.method.pays(shape, itemsize, ranks=over_of(bucket).size)


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of a type are compressed and their errors kept."""
    return torch.promote_types(dtype, torch.float32)


def over_of(bucket: Bucket) -> Over:
    between = bucket.route.between
    return Over(group=between.group, size=between.size, rank=between.index)
