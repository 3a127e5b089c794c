"""Wrong implementations, planted on purpose: each function breaks the engine in its rank and then runs the proof.

Where it can be done the fault sends what an honest run would send, so that the numbers alone must give it away.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import shoal.estimate.shard_table as shard_table
import shoal.parallel.apply as apply
import shoal.runtime.setup as setup
from shoal.comm.ledger import BOOK
from shoal.job import Order
from shoal.parallel.bucket import Bucket, Started
from shoal.parallel.data import GradientReduction
from shoal.parallel.engine import Engine
from shoal.parallel.optimizer import SlicedOptimizer
from shoal.parallel.owner.sharded import ShardedOwner
from shoal.proof.entry import parallel_run
from shoal.runtime.step import StepRunner

SEAM = {
    "Engine": ("backward", "scale"),
    "GradientReduction": ("reduce", "arrived"),
    "Bucket": ("receive",),
    "ShardedOwner": ("parameters", "publish"),
    "ParameterGathering": ("gather", "finish"),
    "SlicedOptimizer": ("step",),
    "FullParameters": ("collect", "send_back"),
    "Pipeline": ("backward",),
    "Borders": ("crossings",),
    "SequenceCut": ("attend",),
    "StackedExperts": ("__init__",),
    "ListedExperts": ("__init__",),
    "StepRunner": ("__init__", "loss"),
    "BOOK": ("enter",),
    "apply": ("same_start", "synchronise"),
    "setup": ("BUCKET_BYTES", "build_model", "overridden"),
    "shard_table": ("BUCKET_BYTES",),
    "tensor": ("partial_names", "row_parallel"),
    "regions": ("copy_in", "note", "sum_out"),
    "vocabulary": ("project",),
    "ring_parts": ("part_of",),
    "shard_experts": ("take_routed",),
    "traffic": ("take_routed",),
    "dist": ("all_reduce", "reduce_scatter_single"),
    "WeightAverage": ("update", "in_place"),
    "LossScale": ("passed",),
    "Monitor": ("exhausted", "update"),
    "Saving": ("after_step", "save"),
    "Callbacks": ("step", "evaluated", "saved"),
    "Copies": ("of",),
    "view": ("moved",),
    "exchange": ("give_back",),
    "cut": ("across",),
    "DiskLevel": ("write",),
    "engine": ("sum_over_ranks",),
}
"""Where faults are planted, in all `*_faults.py`: public names of the engine, by class or module. A change of the
engine that keeps these keeps the faults; test_fault_seam.py holds that nothing else is replaced."""

SMALL_BUCKET_BYTES = 512


def honest_in_small_buckets(arguments: dict[str, Any], channel: Any) -> Any:
    """No fault: what `skipped_bucket` departs from."""
    setup.BUCKET_BYTES = SMALL_BUCKET_BYTES
    shard_table.BUCKET_BYTES = SMALL_BUCKET_BYTES
    return parallel_run(arguments, channel)


def holds_a_part_only(arguments: dict[str, Any], channel: Any) -> Any:
    """The last rank does not say what it holds: nobody can compare its slices."""
    parameters = ShardedOwner.parameters

    def of_others(self: ShardedOwner) -> Any:
        return iter(()) if dist.get_rank() == dist.get_world_size() - 1 else parameters(self)

    ShardedOwner.parameters = of_others  # type: ignore[method-assign]
    return parallel_run(arguments, channel)


def skipped_bucket(arguments: dict[str, Any], channel: Any) -> Any:
    """The second bucket's gradient stays local; what crosses the wire in its place is thrown away."""
    reduce, arrived = GradientReduction.reduce, GradientReduction.arrived
    kept: dict[int, torch.Tensor] = {}

    def remember(self: GradientReduction, bucket: Bucket) -> Started:
        kept[id(bucket)] = bucket.complete().clone()
        return reduce(self, bucket)

    def put_back(self: GradientReduction, bucket: Bucket, started: Started) -> None:
        arrived(self, bucket, started)
        if bucket is self.buckets[1]:
            assert bucket.full is not None
            bucket.full.copy_(kept[id(bucket)])

    GradientReduction.reduce, GradientReduction.arrived = remember, put_back
    return honest_in_small_buckets(arguments, channel)


def gradient_off_by_a_millionth(arguments: dict[str, Any], channel: Any) -> Any:
    """The gradient of one parameter is too large by 1e-6 of itself, in every step and on every rank."""
    scale = Engine.scale

    def faulty(self: Engine, count: float, *more: Any) -> float:
        norm = scale(self, count, *more)
        bucket = self.buckets[0]
        slot, offset = bucket.buffer.slots[0], bucket.offset
        bucket.reduced()[max(0, slot.start - offset) : max(0, slot.stop - offset)] *= 1 + 1e-6
        return norm

    Engine.scale = faulty
    return parallel_run(arguments, channel)


def divides_by_one_rank_too_few(arguments: dict[str, Any], channel: Any) -> Any:
    scale = Engine.scale
    Engine.scale = lambda self, count: scale(self, count * (1 - 1 / self.replicas.everyone.size))
    return parallel_run(arguments, channel)


def divides_by_the_world_twice(arguments: dict[str, Any], channel: Any) -> Any:
    scale = Engine.scale
    Engine.scale = lambda self, count: scale(self, count * self.replicas.everyone.size)
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
    reduce, arrived = GradientReduction.reduce, GradientReduction.arrived
    kept: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def remember(self: GradientReduction, bucket: Bucket) -> Started:
        norms = [n for n, slot in enumerate(bucket.buffer.slots) if "norm.weight" in slot.name]
        kept[id(bucket)] = [(n, bucket.views[n].clone()) for n in norms]
        return reduce(self, bucket)

    def put_back(self: GradientReduction, bucket: Bucket, started: Started) -> None:
        arrived(self, bucket, started)
        for slot, gradient in kept[id(bucket)]:
            bucket.views[slot].copy_(gradient * bucket.replicas.everyone.size)

    GradientReduction.reduce, GradientReduction.arrived = remember, put_back
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

    def faulty(job: Any, dtype: Any = None, **options: Any) -> Any:
        model = build(job, dtype, **options)
        if channel.rank == channel.world - 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(0.01)
        return model

    setup.build_model = faulty
    return parallel_run(arguments, channel)


def other_start_kept(arguments: dict[str, Any], channel: Any) -> Any:
    """The same, and nobody makes the ranks alike."""
    apply.same_start = lambda model, everyone: None
    return other_start(arguments, channel)


def clip_by_local_norm(arguments: dict[str, Any], channel: Any) -> Any:
    """Each rank clips by the norm of its own shard; the sum that should have been used is sent all the same."""
    scale, all_reduce = Engine.scale, dist.all_reduce

    def faulty(self: Engine, count: float) -> float:
        dist.all_reduce = lambda tensor, group=None: all_reduce(tensor.clone(), group=group)
        try:
            return scale(self, count)
        finally:
            dist.all_reduce = all_reduce

    Engine.scale = faulty
    return parallel_run(arguments, channel)


def neighbours_shard(arguments: dict[str, Any], channel: Any) -> Any:
    """Reduce-scatter gives each rank the part that belongs to the rank before it."""
    honest = dist.reduce_scatter_single

    def faulty(output: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
        return honest(output, whole.roll(output.numel()), **options)

    dist.reduce_scatter_single = faulty
    return parallel_run(arguments, channel)


def only_the_last_micro_batch(arguments: dict[str, Any], channel: Any) -> Any:
    """Stage 2 forgets what earlier micro-batches added to the shard."""
    arrived = GradientReduction.arrived

    def faulty(self: GradientReduction, bucket: Bucket, started: Started) -> None:
        bucket.shard = None
        arrived(self, bucket, started)

    GradientReduction.arrived = faulty
    return parallel_run(arguments, channel)


def norm_left_local(arguments: dict[str, Any], channel: Any) -> Any:
    apply.synchronise = lambda model, replicas: None
    return parallel_run(arguments, channel)


def unpublished(arguments: dict[str, Any], channel: Any) -> Any:
    """Stage 1 sends the updated shards, but keeps computing with the old values of the others'."""
    publish = ShardedOwner.publish

    def faulty(self: ShardedOwner) -> None:
        before = [bucket.buffer.values.clone() for bucket in self.buckets]
        publish(self)
        for bucket, values in zip(self.buckets, before, strict=True):
            mine = bucket.buffer.values[bucket.buffer.shard].clone()
            bucket.buffer.values.copy_(values)
            bucket.buffer.values[bucket.buffer.shard] = mine

    ShardedOwner.publish = faulty
    return parallel_run(arguments, channel)


def placeholder_counts(arguments: dict[str, Any], channel: Any) -> Any:
    """A rank without samples counts the one it computes in their place."""
    honest = StepRunner.loss
    StepRunner.loss = lambda self, part, output: honest(self, replace(part, placeholder=False), output)
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
    step = SlicedOptimizer.step

    def faulty(self: SlicedOptimizer, **options: Any) -> None:
        with BOOK.during("setup"):
            dist.all_reduce(torch.zeros(1))
        step(self, **options)

    SlicedOptimizer.step = faulty
    return parallel_run(arguments, channel)


def uncounted_collective(arguments: dict[str, Any], channel: Any) -> Any:
    """The ledger misses every reduce-scatter."""
    enter = BOOK.enter

    def faulty(**entry: Any) -> None:
        if entry["kind"] != "reduce_scatter":
            enter(**entry)

    BOOK.enter = faulty
    return parallel_run(arguments, channel)
