"""Data parallelism: gradients of all replicas become one, bucket by bucket, while backward still runs.

Each gradient is copied into its bucket the moment autograd has it; a full bucket is reduced at once, in an order
that every rank shares. What a reduction is depends on the stage of ZeRO:

    0  all-reduce of the bucket; every rank keeps the whole gradient
    1  reduce-scatter at the last micro-batch; the whole gradient stays until then
    2  reduce-scatter at every micro-batch; the bucket is given back at once, the shard accumulates
    3  as 2; the parameters come and go as well (zero.py)

Levels of dp outside the one that shards replicate it: their ranks all-reduce the shard once, at the end. Losses
are sums, so gradients are sums too; `Engine.step` divides by the global count.

Where a level compresses, what is inside the level is reduced here and the rest when the step is known to count
(`compression.py`). Stage 0 then reduce-scatters, too, so that every rank compresses a part of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.parallel.flat import FlatBuffer
from shoal.parallel.one_memory import OneMemory
from shoal.parallel.placement import Family, Replicas

BUCKET_BYTES = 8 << 20
"""Measured with benchmarks/train.py over Gloo on two cores; PyTorch's 25 MB leaves nothing to overlap there."""

IN_FLIGHT = 2
"""Reduce-scatters on the wire at a time: each holds a bucket's worth of what arrives, which sharding is to save."""


PLAIN = Family()

SHARED = -1
"""The part of a bucket whose gradients come from several stages on this rank: it is reduced when all are done."""

NEVER = 1 << 60
"""So many gradients are missing before a bucket that waits for a word is full."""


class Bucket:
    """A flat buffer of parameters, the gradient that belongs to it, and how far this step's reduction has come."""

    def __init__(
        self,
        buffer: FlatBuffer,
        replicas: Replicas,
        *,
        family: Family = PLAIN,
        part: int = 0,
        memory: OneMemory | None = None,
    ) -> None:
        self.buffer = buffer
        self.replicas = replicas
        self.zero = replicas.zero
        self.family = family
        self.part = part
        """Which of the rank's pipeline stages its parameters belong to; SHARED if to several."""
        self.whole: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.memory = memory
        """Where the gradients of all replicas lie, if they share memory."""
        self.pieces: list[list[tuple[int, torch.Tensor]]] = []
        """Of a gradient that another replica writes to as well, what is written at a time."""
        self.filled = [False] * len(buffer.slots)
        self.missing = len(buffer.slots)
        self.closed = False
        """Whether it was reduced in this backward without some of its gradients."""
        if part == SHARED:
            self.missing = NEVER
            self.keep_apart()
        self.shard: torch.Tensor | None = None
        """Gradient of this rank's shard; stages 2 and 3 keep it apart from the whole."""
        self.route = replicas.route
        self.scattering = replicas.sharding
        """Those among whom the gradient is dealt out while backward runs."""
        self.slice = buffer.shard
        """What this rank gets of it."""
        if self.route is not None and replicas.zero == 0:
            self.scattering = self.route.inside
            size = buffer.padded // self.scattering.size
            self.slice = slice(self.scattering.index * size, (self.scattering.index + 1) * size)

    def receive(self, slot: int, gradient: torch.Tensor) -> None:
        if self.closed:
            raise RuntimeError(
                f"the gradient of {self.buffer.slots[slot].name} arrived after its bucket was reduced: a block before "
                "its own began its backward earlier. Train this model with zero=2"
            )
        self._allocate()
        if self.memory is not None and not self.memory.apart:
            self.memory.add(self.pieces[slot], gradient)
        elif self.filled[slot]:
            self.views[slot].add_(gradient)
        else:
            self.views[slot].copy_(gradient)
        self.filled[slot] = True
        self.missing -= 1

    def receive_product(self, slot: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """A gradient that is a matrix product, accumulated as it is computed. Only where replicas are apart."""
        self._allocate()
        self.views[slot].addmm_(left, right, beta=1.0 if self.filled[slot] else 0.0)
        self.filled[slot] = True
        self.missing -= 1

    def keep_apart(self) -> None:
        """From now on each replica has its own gradient, where they share memory. All of them call it alike, in a step
        that has no gradient yet."""
        if self.memory is not None and not self.memory.apart:
            self.memory.apart = True
            self.whole = None

    def _allocate(self) -> torch.Tensor:
        if self.whole is None:
            if self.memory is not None:
                self.whole = self.memory.mine
            else:
                self.whole = torch.zeros(self.buffer.padded, dtype=self.buffer.dtype, device=self.buffer.device)
            self.views = self.buffer.views_of(self.whole)
            if self.memory is not None and not self.memory.apart:
                self.pieces = self.memory.pieces(self.views)
        return self.whole

    def complete(self) -> torch.Tensor:
        """The whole gradient, with zeros for parameters that took no part."""
        whole = self._allocate()
        for slot, filled in enumerate(self.filled):
            if filled:
                continue
            if self.memory is not None and not self.memory.apart:
                self.memory.add(self.pieces[slot], None)
            else:
                self.views[slot].zero_()
        return whole

    @property
    def stays_whole(self) -> bool:
        """Whether this rank holds the whole gradient until the step ends."""
        return self.route.whole if self.route is not None else self.zero == 0

    def part_to_compress(self) -> tuple[torch.Tensor, int]:
        """This rank's part of the gradient, summed inside the level that compresses, and where in the buffer it is."""
        assert self.route is not None
        if self.route.whole:
            assert self.whole is not None
            return self.whole, 0
        if self.zero >= 2:
            assert self.shard is not None
            return self.shard, self.slice.start
        assert self.whole is not None
        return self.whole[self.slice], self.slice.start

    def keep_shard(self) -> None:
        """Stages 2 and 3, where the whole gradient was compressed: only the shard stays."""
        if self.zero >= 2 and self.stays_whole:
            assert self.whole is not None
            self.shard = self.whole[self.buffer.shard].clone()
            self.whole, self.views = None, []

    def reduced(self) -> torch.Tensor:
        """What the optimiser reads: the whole gradient at stage 0, this rank's shard of it otherwise."""
        if self.zero == 0:
            assert self.whole is not None
            return self.whole
        if self.zero == 1:
            assert self.whole is not None
            return self.whole[self.buffer.shard]
        assert self.shard is not None
        return self.shard


class GradientReduction:
    """Watches the parameters of all buckets and reduces each bucket when its last gradient has arrived."""

    def __init__(self, buckets: Sequence[Bucket], *, every_micro: bool = True) -> None:
        self.buckets = list(buckets)
        self.every_micro = every_micro
        """Whether stages 2 and 3 reduce after every micro-batch. A pipeline does so after the last one only: its
        stages are small, and one reduction for all micro-batches moves that much less."""
        self.used: set[str] = set()
        """Parameters that had a gradient in the step under way."""
        self._at_work: list[Bucket] = []
        self._next = 0
        self._last_micro = True
        self._in_flight: list[tuple[Bucket, Any, torch.Tensor, torch.Tensor | None]] = []
        self._hooks = []
        self.on_done: dict[int, Any] = {}
        """Called when a bucket's gradients have all arrived, by the bucket's identity (ZeRO-3 frees its parameters)."""
        self.before_scatter: Any = None
        """Called with a number of the bucket before it is scattered (ZeRO-3 makes sure that all ranks do so)."""
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
                bucket.keep_apart()

    def hold(self, part: int) -> None:
        """Takes gradients of a stage in without reducing anything, until `start` and `flush`."""
        for bucket in self.buckets:
            if bucket.part == part:
                bucket.missing = NEVER
                bucket.keep_apart()

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
        """After the step's last backward: sees out the reductions of all buckets."""
        if any(bucket.part == SHARED for bucket in self.buckets):
            self.start(last_micro=True, part=SHARED)
            self.flush()
        while self._in_flight:
            self._wait_for_oldest()
        if not self._in_shared_memory:
            self._sum_copies()

    @property
    def _in_shared_memory(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.memory is not None]

    def sum_shared(self) -> None:
        """At the start of the optimiser's step, where replicas share memory: waits for the gradients of all and sums.
        Not earlier: a rank may read parameters until it calls for the step, and the others update them after this."""
        shared = self._in_shared_memory
        if not shared:
            return
        with BOOK.during("gradient"):
            shared[0].memory.meet()  # type: ignore[union-attr]
        for bucket in shared:
            bucket.memory.sum_slice(bucket.buffer.shard)  # type: ignore[union-attr]
        self._sum_copies()

    def _done(self, bucket: Bucket) -> None:
        if id(bucket) in self.on_done:
            self.on_done[id(bucket)]()
        # In the order of buckets, on every rank alike: collectives must match even if arrivals do not.
        while self._next < len(self._at_work) and self._at_work[self._next].missing == 0:
            ready = self._at_work[self._next]
            self._next += 1
            if self._last_micro or (ready.zero >= 2 and self.every_micro):
                self._reduce(ready)

    def _reduce(self, bucket: Bucket) -> None:
        whole = bucket.complete()
        if self.before_scatter is not None and not bucket.stays_whole:
            self.before_scatter(-1 - self.buckets.index(bucket))
        if bucket.memory is not None:
            return  # The others will read it where it is.
        work, target = None, None
        with BOOK.during("gradient"):
            if bucket.stays_whole:
                together = bucket.route.inside if bucket.route is not None else bucket.replicas.everyone
                if together.group is not None:
                    work = dist.all_reduce(whole, group=together.group, async_op=True)
            else:
                target = whole[bucket.slice]
                if bucket.zero >= 2:
                    target = torch.empty_like(target)
                if bucket.scattering.group is not None:
                    work = dist.reduce_scatter_single(target, whole, group=bucket.scattering.group, async_op=True)
                elif bucket.zero >= 2:
                    target.copy_(whole)
        if bucket.zero >= 2 and not bucket.stays_whole:
            bucket.whole, bucket.views = None, []
            bucket.filled = [False] * len(bucket.filled)
        self._in_flight.append((bucket, work, whole, target))
        if bucket.zero >= 1:
            while self._in_flight and (len(self._in_flight) > IN_FLIGHT or self._oldest_has_arrived()):
                self._wait_for_oldest()

    def _oldest_has_arrived(self) -> bool:
        work = self._in_flight[0][1]
        return work is None or work.is_completed()

    def _wait_for_oldest(self) -> None:
        bucket, work, _, target = self._in_flight.pop(0)
        if work is not None:
            work.wait()
        if bucket.zero >= 2 and target is not None:
            if bucket.shard is None:
                bucket.shard = target
            else:
                bucket.shard.add_(target)

    def _sum_copies(self) -> None:
        with BOOK.during("gradient"):
            works = []
            for bucket in self.buckets:
                if bucket.zero and not bucket.stays_whole:
                    copies = bucket.replicas.copies if bucket.route is None else bucket.route.inside
                    if copies.group is not None:
                        works.append(dist.all_reduce(bucket.reduced(), group=copies.group, async_op=True))
        for work in works:
            work.wait()

    def clear(self) -> None:
        """After the optimiser's step: the next step's gradients start from nothing."""
        self.used = set()
        for bucket in self.buckets:
            bucket.filled = [False] * len(bucket.filled)
            if bucket.part == SHARED:
                bucket.missing = NEVER
            if bucket.zero >= 2:
                bucket.shard = None
            if bucket.memory is not None:
                bucket.memory.next_step()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
