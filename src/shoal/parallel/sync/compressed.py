"""Compressed rounds of islands: how far this island moved goes through the codec of the level, which keeps what was not
sent for the fragment's next round.

`Compression` sums parts of buckets; here a part is the move of a bucket's slices, and the ranks are those of islands.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from shoal.comm.compress.method import Method
from shoal.comm.mesh import Members
from shoal.parallel.compression import Compression, working_type
from shoal.parallel.placement import Route

if TYPE_CHECKING:
    from shoal.parallel.bucket import Bucket
    from shoal.parallel.sync.fragments import Portion
    from shoal.parallel.sync.outer import OuterLevel


class MovedBucket:
    """What of a bucket belongs to a fragment, as `Compression` sees it."""

    def __init__(self, level: OuterLevel, bucket: Bucket, portion: Portion) -> None:
        self._level = level
        whole, names = bucket.buffer, set(portion.names)
        slots = [slot for slot in whole.slots if slot.name in names]
        self.buffer: Any = SimpleNamespace(slots=slots, dtype=whole.dtype, device=whole.device)
        self.compressed = whole.shard
        self.writes_errors = bucket.replicas.copies.index == 0
        self.part = torch.zeros(0)

    @property
    def route(self) -> Route:
        """Of the islands that are left."""
        alone = Members("none", (self._level.placement.mesh.rank,), 0, None)
        return Route(alone, self._level.islands, alone, False)

    def part_to_compress(self) -> torch.Tensor:
        return self.part

    def after_compression(self) -> None:
        """The sum is in place."""


class CompressedMoves:
    """The codec of one fragment, with what it keeps."""

    def __init__(self, level: OuterLevel, portion: Portion, method: Method, *, seed: int) -> None:
        self.portion = portion
        self.buckets = [MovedBucket(level, bucket, portion) for bucket in level.buckets]
        self.compression = Compression(self.buckets, method, seed=seed)  # type: ignore[arg-type]

    def total(self, moves: list[torch.Tensor], weight: float, number: int) -> None:
        """The weighted moves of all islands, in place; `number`: of the fragment's rounds, from 0."""
        at, parts = self.portion.split(moves), []
        for bucket, ranges in zip(self.buckets, self.portion.ranges, strict=True):
            size = bucket.compressed.stop - bucket.compressed.start
            bucket.part = torch.zeros(size, dtype=working_type(bucket.buffer.dtype), device=bucket.buffer.device)
            parts += [bucket.part[low:high] for low, high in ranges]
        for part, move in zip(parts, at, strict=True):
            part.copy_(move).mul_(weight)
        self.compression.step = number
        self.compression.reduce(1.0, frozenset())
        for part, move in zip(parts, at, strict=True):
            move.copy_(part)
        for bucket in self.buckets:
            bucket.part = torch.zeros(0)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """What it keeps, to be put back by `restore` where a round has to be repeated."""
        return [dict(each.state) for each in self._fragments()]

    def restore(self, state: list[dict[str, torch.Tensor]]) -> None:
        for each, before in zip(self._fragments(), state, strict=True):
            each.state.clear()
            each.state.update(before)

    def _fragments(self) -> list[Any]:
        return [each for bucket in self.buckets for each in self.compression.fragments[id(bucket)]]
