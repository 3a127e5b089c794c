"""Wrong implementations, planted on purpose: each function breaks the engine in its rank and then runs the proof.

Where it can be done the fault sends what an honest run would send, so that the numbers alone must give it away.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shoal.estimate.shard_table as shard_table
import shoal.parallel.apply as apply
import shoal.parallel.data as data
import shoal.runtime.setup as setup
from shoal.comm.counted import CountedGroup
from shoal.job import Order
from shoal.parallel.data import Bucket, GradientReduction
from shoal.parallel.engine import Engine
from shoal.parallel.optimizer import SlicedOptimizer
from shoal.proof.entry import parallel_run
from shoal.runtime.step import StepRunner

SMALL_BUCKET_BYTES = 512


def honest_in_small_buckets(arguments: dict[str, Any], channel: Any) -> Any:
    """No fault: what `skipped_bucket` departs from."""
    setup.parallelize = partial(apply.parallelize, bucket_bytes=SMALL_BUCKET_BYTES)
    shard_table.BUCKET_BYTES = SMALL_BUCKET_BYTES
    return parallel_run(arguments, channel)


def skipped_bucket(arguments: dict[str, Any], channel: Any) -> Any:
    """The second bucket's gradient stays local; what crosses the wire in its place is thrown away."""
    reduce = GradientReduction._reduce

    def faulty(self: GradientReduction, bucket: Bucket) -> None:
        kept = bucket.complete().clone()
        reduce(self, bucket)
        if bucket is self.buckets[1]:
            self._in_flight[-1][1].wait()
            assert bucket.whole is not None
            bucket.whole.copy_(kept)

    GradientReduction._reduce = faulty
    return honest_in_small_buckets(arguments, channel)


def gradient_off_by_a_millionth(arguments: dict[str, Any], channel: Any) -> Any:
    """The gradient of one parameter is too large by 1e-6 of itself, in every step and on every rank."""
    scale = Engine.scale

    def faulty(self: Engine, gradients: dict[int, torch.Tensor], count: float, *more: Any) -> float:
        norm = scale(self, gradients, count, *more)
        bucket, offset = self.buckets[0], self.offsets[0]
        slot = bucket.buffer.slots[0]
        gradients[id(bucket)][max(0, slot.start - offset) : max(0, slot.stop - offset)] *= 1 + 1e-6
        return norm

    Engine.scale = faulty
    return parallel_run(arguments, channel)


def divides_by_one_rank_too_few(arguments: dict[str, Any], channel: Any) -> Any:
    scale = Engine.scale
    Engine.scale = lambda self, gradients, count: scale(self, gradients, count * (1 - 1 / self.replicas.everyone.size))
    return parallel_run(arguments, channel)


def divides_by_the_world_twice(arguments: dict[str, Any], channel: Any) -> Any:
    scale = Engine.scale
    Engine.scale = lambda self, gradients, count: scale(self, gradients, count * self.replicas.everyone.size)
    return parallel_run(arguments, channel)


def mean_of_means(arguments: dict[str, Any], channel: Any) -> Any:
    """Every rank gives the mean of its own samples and counts for one."""
    backward = Engine.backward

    def faulty(self: Engine, loss: torch.Tensor, count: Any, *, last: bool = True) -> None:
        backward(self, loss / max(float(count), 1.0), 1.0, last=last)

    Engine.backward = faulty
    return parallel_run(arguments, channel)


def unreduced_norm(arguments: dict[str, Any], channel: Any) -> Any:
    """The weights of norms keep each rank's own gradient, at the size it should have."""
    reduce, wait = GradientReduction._reduce, GradientReduction._wait_for_oldest
    kept: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def remember(self: GradientReduction, bucket: Bucket) -> None:
        bucket.complete()
        norms = [n for n, slot in enumerate(bucket.buffer.slots) if "norm.weight" in slot.name]
        kept[id(bucket)] = [(n, bucket.views[n].clone()) for n in norms]
        reduce(self, bucket)

    def put_back(self: GradientReduction) -> None:
        bucket = self._in_flight[0][0]
        wait(self)
        for slot, gradient in kept[id(bucket)]:
            bucket.views[slot].copy_(gradient * bucket.replicas.everyone.size)

    GradientReduction._reduce, GradientReduction._wait_for_oldest = remember, put_back
    return parallel_run(arguments, channel)


def misseeded_order(arguments: dict[str, Any], channel: Any) -> Any:
    """The last rank shuffles its data by another seed."""
    begin = StepRunner.__init__

    def faulty(self: StepRunner, job: Any, executor: Any, *rest: Any, **options: Any) -> None:
        begin(self, job, executor, *rest, **options)
        engine = executor.engine
        if engine.replicas.everyone.index == engine.replicas.everyone.size - 1:
            self.order = Order(job.seed + 1, len(job.train), job.global_batch, job.last_batch)

    StepRunner.__init__ = faulty
    return parallel_run(arguments, channel)


def other_start(arguments: dict[str, Any], channel: Any) -> Any:
    """The last rank builds its model with another seed. No fault: everyone starts from rank 0's values."""
    build = setup.build_model

    def faulty(job: Any, dtype: Any = None) -> Any:
        model = build(job, dtype)
        if channel.rank == channel.world - 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(0.01)
        return model

    setup.build_model = faulty
    return parallel_run(arguments, channel)


def other_start_kept(arguments: dict[str, Any], channel: Any) -> Any:
    """The same, and nobody makes the ranks alike."""
    apply._same_start = lambda model, everyone: None
    return other_start(arguments, channel)


def clip_by_local_norm(arguments: dict[str, Any], channel: Any) -> Any:
    """Each rank clips by the norm of its own shard; the sum that should have been used is sent all the same."""
    scale, all_reduce = Engine.scale, dist.all_reduce

    def faulty(self: Engine, gradients: list[torch.Tensor], count: float) -> float | None:
        dist.all_reduce = lambda tensor, group=None: all_reduce(tensor.clone(), group=group)
        try:
            return scale(self, gradients, count)
        finally:
            dist.all_reduce = all_reduce

    Engine.scale = faulty
    return parallel_run(arguments, channel)


def neighbours_shard(arguments: dict[str, Any], channel: Any) -> Any:
    """Reduce-scatter gives each rank the part that belongs to the rank before it."""
    honest = dist.reduce_scatter_single

    def faulty(output: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
        return honest(output, whole.roll(output.numel()), **options)

    data.dist.reduce_scatter_single = faulty
    return parallel_run(arguments, channel)


def only_the_last_micro_batch(arguments: dict[str, Any], channel: Any) -> Any:
    """Stage 2 forgets what earlier micro-batches added to the shard."""
    wait = GradientReduction._wait_for_oldest

    def faulty(self: GradientReduction) -> None:
        self._in_flight[0][0].shard = None
        wait(self)

    GradientReduction._wait_for_oldest = faulty
    return parallel_run(arguments, channel)


def norm_left_local(arguments: dict[str, Any], channel: Any) -> Any:
    apply.synchronise = lambda model, replicas: None
    return parallel_run(arguments, channel)


def unpublished(arguments: dict[str, Any], channel: Any) -> Any:
    """Stage 1 sends the updated shards, but keeps computing with the old values of the others'."""
    publish = Engine._publish

    def faulty(self: Engine) -> None:
        before = [bucket.buffer.values.clone() for bucket in self.buckets]
        publish(self)
        for bucket, values in zip(self.buckets, before, strict=True):
            mine = bucket.buffer.values[bucket.buffer.shard].clone()
            bucket.buffer.values.copy_(values)
            bucket.buffer.values[bucket.buffer.shard] = mine

    Engine._publish = faulty
    return parallel_run(arguments, channel)


def stand_in_counts(arguments: dict[str, Any], channel: Any) -> Any:
    """A rank without samples counts the one it computes in their place."""
    honest = StepRunner.loss
    StepRunner.loss = lambda self, part, output: honest(self, replace(part, stand_in=False), output)
    return parallel_run(arguments, channel)


def hidden_collective(arguments: dict[str, Any], channel: Any) -> Any:
    """The optimiser sends something of its own; the numbers stay right."""
    step = SlicedOptimizer.step

    def faulty(self: SlicedOptimizer, **options: Any) -> None:
        dist.all_reduce(torch.zeros(1))
        step(self, **options)

    SlicedOptimizer.step = faulty
    return parallel_run(arguments, channel)


def collective_in_another_phase(arguments: dict[str, Any], channel: Any) -> Any:
    """As above, entered as if it belonged to the set-up."""
    from shoal.comm.ledger import BOOK

    step = SlicedOptimizer.step

    def faulty(self: SlicedOptimizer, **options: Any) -> None:
        with BOOK.during("setup"):
            dist.all_reduce(torch.zeros(1))
        step(self, **options)

    SlicedOptimizer.step = faulty
    return parallel_run(arguments, channel)


def uncounted_collective(arguments: dict[str, Any], channel: Any) -> Any:
    """The ledger misses every reduce-scatter."""
    enter = CountedGroup._enter

    def faulty(self: CountedGroup, kind: str, payload_bytes: int, algorithm: str | None = None) -> None:
        if kind != "reduce_scatter":
            enter(self, kind, payload_bytes, algorithm)

    CountedGroup._enter = faulty
    return parallel_run(arguments, channel)
