"""From a job and a strategy to an engine on this rank: what `train` and `verify` both begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.comm.mesh import Mesh
from shoal.estimate.traffic import Buffer, Group, Norm, ShardTable
from shoal.job import Job, load_job
from shoal.job.elementwise import elementwise
from shoal.parallel.apply import parallelize
from shoal.parallel.batch_norm import batch_norms
from shoal.parallel.engine import Engine
from shoal.parallel.units import blocks
from shoal.strategy import Strategy, amp, recompute
from shoal.train.step import StepRunner, build_model

OVERRIDES = ("steps", "global_batch", "seed", "evaluate_every")
"""What the command line may change of a job."""


@dataclass
class Prepared:
    """A rank that is ready to train."""

    job: Job
    strategy: Strategy
    engine: Engine
    runner: StepRunner

    @property
    def table(self) -> ShardTable:
        """What the traffic formulas read. The first step settles it: only then is it known how blocks are used."""
        return shard_table(self.job, self.strategy, self.engine)


def job_from(arguments: dict[str, Any]) -> Job:
    """The job that a command's arguments name, with its overrides."""
    job = load_job(arguments["job"], size=arguments.get("size"))
    changed = {name: arguments[name] for name in OVERRIDES if arguments.get(name) is not None}
    return replace(job, **changed) if changed else job


def prepare(job: Job, strategy: Strategy, *, rank: int, backend: str | None, device: Any = "cpu",
            dtype: torch.dtype | None = None) -> Prepared:  # fmt: skip
    """Builds the model, lays the strategy over it, and makes ready to step. All ranks call it alike."""
    mesh = Mesh([(axis.name, axis.size) for axis in strategy.axes], rank=rank, backend=backend)
    model = build_model(job, dtype).to(device)
    engine = parallelize(
        model, strategy, mesh, optimizer=job.optimizer, options=job.options, clip=job.clip,
        elementwise=elementwise(job.optimizer), batch_norm=job.batch_norm,
    )  # fmt: skip
    runner = StepRunner(
        job, engine, micro_batches=strategy.micro_batches, autocast=strategy.modifier(amp) is not None, dtype=dtype
    )
    return Prepared(job, strategy, engine, runner)


def shard_table(job: Job, strategy: Strategy, engine: Engine) -> ShardTable:
    """What the traffic formulas need to know, read off the engine's buffers and the model's batch norms."""
    replicas = engine.replicas
    regathered = set()
    if engine.gathering is not None:
        for unit in engine.gathering.units:
            if not unit.is_root and not unit.is_last and not unit.held:
                regathered |= {id(shard.buffer) for shard in unit.shards}
    again = strategy.modifier(recompute) is not None
    in_blocks = tuple(name for name, _ in blocks(engine.model)) if again else ()
    norms = []
    if job.batch_norm == "sync" and replicas.everyone.size > 1:
        for name, module in batch_norms(engine.model):
            if not module.training and module.running_mean is not None:
                continue  # The model keeps it as it was pretrained.
            inside = any(name == block or name.startswith(block + ".") for block in in_blocks)
            width = torch.promote_types(next(engine.model.parameters()).dtype, torch.float32).itemsize
            norms.append(Norm(channels=module.num_features, itemsize=width, recomputed=inside))
    return ShardTable(
        zero=replicas.zero,
        micro_batches=strategy.micro_batches,
        num_parameters=len(engine.names),
        replicas=Group(axis=replicas.everyone.axis, ranks=replicas.everyone.size),
        sharding=Group(axis=replicas.sharding.axis, ranks=replicas.sharding.size),
        copies=Group(axis=replicas.copies.axis, ranks=replicas.copies.size),
        buffers=tuple(
            Buffer(padded_bytes=b.buffer.bytes, regathered=id(b.buffer) in regathered) for b in engine.buckets
        ),
        norms=tuple(norms),
    )
