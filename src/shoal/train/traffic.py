"""What the traffic formulas need to know of a rank, read off its engine: the shard table, what other axes sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.comm.compress.traffic import Transfer, joined
from shoal.comm.mesh import Members
from shoal.estimate.attention_traffic import attention_calls
from shoal.estimate.expert_traffic import expert_traffic
from shoal.estimate.pipeline_traffic import pipeline_traffic
from shoal.estimate.tensor_traffic import crossing_calls
from shoal.estimate.traffic import NUMBER_BYTES, Buffer, Call, Compressed, Group, Norm, ShardTable
from shoal.job import Job
from shoal.parallel.batch_norm import batch_norms, take_calls_by_others
from shoal.parallel.compression import working_type
from shoal.parallel.data import Bucket
from shoal.parallel.engine import Engine
from shoal.parallel.executor import Executor
from shoal.parallel.expert.deal_out import take_routed
from shoal.parallel.global_loss import GlobalLoss
from shoal.parallel.pipeline.executor import Pipeline
from shoal.parallel.pipeline.pipedream import PipeDream
from shoal.strategy import Strategy, recompute
from shoal.workload.blocks import blocks


def shard_table(job: Job, strategy: Strategy, executor: Executor, calls: Sequence[Call]) -> ShardTable:
    """What the traffic formulas need to know, read off the engine's buffers and the model's batch norms."""
    engine = executor.engine
    placement = engine.placement
    again = strategy.modifier(recompute) is not None
    in_blocks = tuple(name for name, _ in blocks(engine.model)) if again else ()
    norms = []
    if job.batch_norm == "sync" and placement.samples.size > 1:
        for name, module in batch_norms(engine.model):
            if not module.training and module.running_mean is not None:
                continue  # The model keeps it as it was pretrained.
            if f"{name}.running_mean" in engine.absent:
                continue
            inside = any(name == block or name.startswith(block + ".") for block in in_blocks)
            width = torch.promote_types(next(engine.model.parameters()).dtype, torch.float32).itemsize
            norms.append(Norm(channels=module.num_features, itemsize=width, recomputed=inside))
        for (channels, itemsize), (asked, repeated) in engine.norms_by_others.items():
            norms += (asked // strategy.micro_batches) * [
                Norm(channels=channels, itemsize=itemsize, recomputed=repeated > 0)
            ]
    unflushed = executor if isinstance(executor, PipeDream) else None
    return ShardTable(
        zero=placement.zero,
        one_memory=placement.one_memory,
        micro_batches=strategy.micro_batches,
        num_parameters=len(unflushed.names if unflushed else engine.names),
        world=_group(placement.island),
        norm=_group(unflushed.norm if unflushed else placement.norm),
        stage=_group(unflushed.update_group) if unflushed else None,
        samples=_group(placement.samples),
        buffers=tuple(_buffers(strategy, executor)),
        norms=tuple(norms),
        calls=tuple(calls),
    )


def _group(members: Members) -> Group:
    return Group(axis=members.axis, ranks=members.size)


def _buffers(strategy: Strategy, executor: Executor) -> Iterator[Buffer]:
    """The engine's flat buffers, and how often each moves in a step."""
    engine = executor.engine
    micro, pipelined = strategy.micro_batches, engine.pipelined
    every_micro = executor.update_group is not None
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for unit in engine.gathering.units if engine.gathering is not None else ():
        stays = unit.is_root or unit.held
        for shard in unit.shards:
            forward[id(shard.buffer)] = 1 if pipelined and stays else micro
            backward[id(shard.buffer)] = 0 if stays or unit.is_last else micro
    for bucket in engine.buckets:
        replicas = bucket.replicas
        yield Buffer(
            padded_bytes=bucket.buffer.bytes,
            replicas=_group(replicas.everyone),
            sharding=_group(replicas.sharding),
            copies=_group(replicas.copies),
            compressed=_compressed(engine, bucket),
            reductions=micro if every_micro or (replicas.zero >= 2 and not pipelined) else 1,
            forward_gathers=forward.get(id(bucket.buffer), 0),
            backward_gathers=backward.get(id(bucket.buffer), 0),
        )


def _compressed(engine: Engine, bucket: Bucket) -> Compressed | None:
    """What the step just made sent of a bucket, where a level of dp compresses."""
    compression, route = engine.compression, bucket.route
    if compression is None or route is None:
        return None
    itemsize = working_type(bucket.buffer.dtype).itemsize
    reductions = [
        compression.method.sent_bytes(
            each.shape, itemsize, route.between.size, compression.step - 1, rank=route.between.index
        )
        for each in compression.sent(bucket)
    ]
    transfers = joined(calls for calls in reductions if calls is not None)
    dense = sum(high - low for low, high in compression.dense_ranges(bucket)) * bucket.buffer.dtype.itemsize
    if dense:
        transfers.append(Transfer("all_reduce", dense))
    return Compressed(
        inside=_group(route.inside), between=_group(route.between), outside=_group(route.outside), whole=route.whole,
        transfers=tuple(transfers),
    )  # fmt: skip


def axis_calls(strategy: Strategy, executor: Executor) -> Iterator[Call]:
    """What the axes other than dp sent in the step just made, by their formulas."""
    engine = executor.engine
    engine.norms_by_others = take_calls_by_others(engine.model)
    cut, placement = engine.cut, engine.placement
    if isinstance(executor, Pipeline):
        yield from pipeline_traffic(
            axis=executor.members.axis, ranks=executor.members.size,
            before=executor.crossings(before=True), behind=executor.crossings(before=False),
            numbers_bytes=2 * NUMBER_BYTES if executor.update_group is not None else 0,
        )  # fmt: skip
    yield from crossing_calls(_group(placement.tensor), cut.crossings.take())
    if cut.sequence is not None:
        calls, gathered = cut.sequence.take()
        yield from attention_calls(calls, cut.sequence.method, _group(placement.context))
        for crossing in gathered:
            yield from crossing_calls(_group(placement.context), {crossing: 1})
    yield from expert_traffic(take_routed(engine.model))
    if engine.buffers is not None:
        yield from engine.buffers.calls()


def global_loss_calls(loss: GlobalLoss) -> Iterator[Call]:
    """What a loss over the global batch gathered since this was last asked."""
    yield from crossing_calls(_group(loss.samples), loss.crossings.take())


def forget_calls(executor: Executor) -> None:
    """Before a step: what was sent until now (in an evaluation) is not the step's."""
    engine = executor.engine
    engine.cut.crossings.take()
    take_calls_by_others(engine.model)
    if isinstance(executor, Pipeline):
        executor.borders.forget()
    if engine.cut.sequence is not None:
        engine.cut.sequence.take()
    take_routed(engine.model)
