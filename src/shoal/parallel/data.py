"""Data parallelism: gradients of all replicas become one, bucket by bucket, while backward still runs.

Each gradient is copied into its bucket the moment autograd has it; a full bucket is reduced at once, in an order
that every rank shares. What a reduction is depends on the owner of the parameters (`owner/`):

    replicated         all-reduce of the bucket; every rank keeps the full gradient
    sharded, stage 1   reduce-scatter at the last micro-batch; the full gradient stays until then
    stages 2 and 3     reduce-scatter at every micro-batch; the bucket is freed at once, the shard accumulates
    shared memory      nothing is sent: replicas read each other's gradients where they are

Levels of dp outside the one that shards replicate it: their ranks all-reduce the shard once, at the end. Losses
are sums, so gradients are sums too; `Engine.step` divides by the global count.

Where a level compresses, what is inside the level is reduced here and the rest when the step is known to count
(`compression.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.parallel.bucket import NEVER, SHARED, Bucket, Started
from shoal.parallel.noise import GradientNoise
from shoal.parallel.placement import Family

IN_FLIGHT = 2
"""Reduce-scatters on the wire at a time: each holds a bucket's worth of what arrives, which sharding is to save."""


class GradientReduction:
    """Watches the parameters of all buckets and reduces each bucket when its last gradient has arrived."""

    def __init__(self, buckets: Sequence[Bucket], *, every_micro: bool = True) -> None:
        self.buckets = list(buckets)
        self.every_micro = every_micro
        """Whether stages 2 and 3 reduce after every micro-batch. A pipeline does so after the last one only: its
        stages are small, and one reduction for all micro-batches moves that much less."""
        self.used: set[str] = set()
        """Parameters that had a gradient in the step under way."""
        self.on_done: dict[int, Callable[[], None]] = {}
        """Called when a bucket's gradients have all arrived, by the bucket's identity (ZeRO-3 frees its parameters)."""
        self.before_scatter: Callable[[int], None] | None = None
        """Called with a number of the bucket before it is scattered (ZeRO-3 makes sure that all ranks do so)."""
        self.on_reduced: Callable[[Bucket], None] | None = None
        """Called with a bucket once its gradient needs no more sums in this step (servers are sent it at once)."""
        self.noise: GradientNoise | None = None
        """Where the noise of gradients is measured; `holders` then has the ranks that hold each family alike."""
        self.holders: dict[Family, int] = {}
        self._at_work: list[Bucket] = []
        self._next = 0
        self._last_micro = True
        self._in_flight: list[tuple[Bucket, Started]] = []
        self._hooks = []
        for bucket in self.buckets:
            for slot, entry in enumerate(bucket.buffer.slots):
                self._hooks.append(entry.param.register_post_accumulate_grad_hook(self._hook(bucket, slot, entry.name)))

    def _hook(self, bucket: Bucket, slot: int, name: str) -> Any:
        def arrived(param: nn.Parameter) -> None:
            if param.grad is None:
                return  # A backward that leaves this parameter out for now.
            gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
            param.grad = None
            self.deliver(bucket, slot, name, gradient)

        return arrived

    def deliver(self, bucket: Bucket, slot: int, name: str, gradient: torch.Tensor) -> None:
        """Takes in the gradient of one parameter."""
        if self.noise is not None:
            self.noise.see(gradient, self.holders[bucket.family])
        bucket.receive(slot, gradient)
        self.used.add(name)
        if bucket.missing == 0:
            self._done(bucket)

    def start(self, *, last_micro: bool, part: int = 0) -> None:
        """Before a micro-batch's backward through one of this rank's stages."""
        self._at_work = [bucket for bucket in self.buckets if bucket.part == part]
        self._next = 0
        self._last_micro = last_micro
        for bucket in self._at_work:
            bucket.missing, bucket.closed = len(bucket.buffer.slots), False
            if not last_micro:
                bucket.keep_private()

    def hold(self, part: int) -> None:
        """Takes gradients of a stage in without reducing anything, until `start` and `flush`."""
        for bucket in self.buckets:
            if bucket.part == part:
                bucket.missing = NEVER
                bucket.keep_private()

    def flush(self) -> None:
        """After a micro-batch's backward: what is not on the wire yet goes out now. A bucket may be late on some ranks
        only (a parameter has no gradient there), so nothing else may be sent over the same ranks before this."""
        for bucket in self._at_work:
            if bucket.missing:
                bucket.missing = 0
                self._done(bucket)

    def close_partial(self, buckets: Sequence[Bucket]) -> None:
        """Takes buckets for full that have some of their gradients, since no more will come in this backward."""
        for bucket in buckets:
            if 0 < bucket.missing < len(bucket.buffer.slots):
                bucket.missing, bucket.closed = 0, True
                self._done(bucket)

    def finish(self) -> None:
        """After the step's last backward: waits for the reductions of all buckets."""
        if any(bucket.part == SHARED for bucket in self.buckets):
            self.start(last_micro=True, part=SHARED)
            self.flush()
        while self._in_flight:
            self._wait_for_oldest()
        sum_copies(bucket for bucket in self.buckets if not bucket.late)

    def _done(self, bucket: Bucket) -> None:
        if id(bucket) in self.on_done:
            self.on_done[id(bucket)]()
        # In the order of buckets, on every rank alike: collectives must match even if arrivals do not.
        while self._next < len(self._at_work) and self._at_work[self._next].missing == 0:
            ready = self._at_work[self._next]
            self._next += 1
            if self._last_micro or (ready.every_micro and self.every_micro):
                self._send(ready)

    def _send(self, bucket: Bucket) -> None:
        bucket.complete()
        if self.before_scatter is not None and bucket.scatters:
            self.before_scatter(-1 - self.buckets.index(bucket))
        with BOOK.during("gradient"):
            self._in_flight.append((bucket, self.reduce(bucket)))
        if bucket.limited or self.on_reduced is not None:
            while self._in_flight and (self._too_many(bucket) or self._oldest_has_arrived()):
                self._wait_for_oldest()

    def _too_many(self, bucket: Bucket) -> bool:
        return bucket.limited and len(self._in_flight) > IN_FLIGHT

    def reduce(self, bucket: Bucket) -> Started:
        """Starts the reduction of a bucket whose gradient is complete."""
        return bucket.reduce()

    def arrived(self, bucket: Bucket, started: Started) -> None:
        """The reduction of a bucket has ended."""
        bucket.arrived(started)

    def _oldest_has_arrived(self) -> bool:
        work = self._in_flight[0][1].work
        return work is None or work.is_completed()

    def _wait_for_oldest(self) -> None:
        bucket, started = self._in_flight.pop(0)
        if started.work is not None:
            started.work.wait()
        self.arrived(bucket, started)
        final = self._last_micro and (bucket.copies is None or bucket.copies.group is None)
        if final and self.on_reduced is not None and bucket.part != SHARED:
            self.on_reduced(bucket)

    def clear(self) -> None:
        """After the optimiser's step: the next step's gradients start from nothing."""
        self.used = set()
        for bucket in self.buckets:
            bucket.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def sum_copies(buckets: Iterable[Bucket]) -> None:
    """Sums the reduced gradient of each bucket over the ranks that hold the same shard."""
    with BOOK.during("gradient"):
        works = [
            dist.all_reduce(bucket.reduced(), group=bucket.copies.group, async_op=True)
            for bucket in buckets
            if bucket.copies is not None and bucket.copies.group is not None
        ]
    for work in works:
        work.wait()
