"""From a job and a strategy to an engine on this rank: what `train` and `verify` both begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.comm.json_exchange import exchange, only_among
from shoal.comm.ledger import Ledger
from shoal.comm.transport.emulated import host_of
from shoal.estimate.outer_calls import period, period_calls
from shoal.estimate.traffic import ShardTable, ledger_of, predict
from shoal.job import Job, JobError, load_job
from shoal.job.buffers import buffer_modes
from shoal.job.elementwise import Probe, probe
from shoal.job.facts import build_without_memory
from shoal.job.large_batch import parse_growth
from shoal.job.on_disk import leaving_pages
from shoal.job.overrides import overridden
from shoal.job.own_code import require_runs
from shoal.job.random_optimizer import UpdateDraws, draws_numbers, without_draws
from shoal.job.randomness import Randomness
from shoal.job.weights.start import start_from
from shoal.launch.devices import devices_here
from shoal.layout.held_outside import Outside
from shoal.layout.layout import layout_of
from shoal.parallel.apply import executor_for, parallelize
from shoal.parallel.bucket import BUCKET_BYTES
from shoal.parallel.buffers import buffer_exchange
from shoal.parallel.by_hosts import asks_for_hosts, by_hosts
from shoal.parallel.engine import Engine
from shoal.parallel.executor import Executor
from shoal.parallel.placement import mesh_of
from shoal.runtime.compiled import require_uncompiled, running_eagerly
from shoal.runtime.draws import cuts_of, places_of
from shoal.runtime.options import JobOptions
from shoal.runtime.servers import announcer, connect
from shoal.runtime.step import StepRunner, build_model
from shoal.runtime.traffic import Expected
from shoal.strategy import Strategy, amp, ep, offload, pp, tp

WARMUP = 20
"""The part of a run's steps, as 1/n, in which a scaled rate is reached unless another number is given."""


@dataclass
class Prepared:
    """A rank that is ready to train."""

    job: Job
    strategy: Strategy
    executor: Executor
    runner: StepRunner
    optimizer: Probe
    """What was found out about the job's optimiser."""
    expected: Expected
    """What its steps should send."""
    watched: Any = None
    """In a proof: what it keeps of each step for its comparison."""

    @property
    def engine(self) -> Engine:
        return self.executor.engine

    def close(self) -> None:
        """Gives the model back. All ranks call it alike."""
        self.executor.settle()
        self.engine.close()
        only_among(None)

    @property
    def table(self) -> ShardTable:
        """What the traffic formulas read of the step just made. All ranks ask for it alike."""
        batches, total = self.runner.last_batches, self.runner.last_total
        if not batches:  # No step was made.
            indices = self.runner.order.indices(0)
            parts = [self.runner.part(micro, indices, 0) for micro in range(self.strategy.micro_batches)]
            batches, total = [part.batch for part in parts], len(indices)
        return self.expected.table(batches, total)

    @property
    def predicted(self) -> Ledger:
        """What this rank should send in a steady-state step."""
        return predict(self.table, self.engine.placement.mesh.algorithm)

    @property
    def predicted_bytes(self) -> float:
        """What this rank should send in a step, on the average of a period of islands. All ranks ask for it alike."""
        table = self.table
        choose = self.engine.placement.mesh.algorithm
        found = predict(table, choose)
        if self.engine.outer is None or self.engine.owner.tickets is not None:
            return float(found.bytes)
        rounds = ledger_of([call for call in period_calls(self.expected.held, table) if call[-1] > 1], choose)
        return found.without("outer").bytes + rounds.bytes / period(self.strategy)

    def differences(self, counted: Ledger) -> list[str]:
        """How the ledger of the step just made departs from its prediction, but for what data alone decide."""
        undecided = frozenset().union(*(each.undecided for each in self.engine.compressions))
        return _decided(counted.without("agreement"), undecided).differences(_decided(self.predicted, undecided))


def _decided(ledger: Ledger, undecided: frozenset[tuple[str, str]]) -> Ledger:
    """Without the compressed exchanges that data alone decide."""
    sized = {key for key in ledger.entries if key.phase in ("gradient", "outer") and (key.axis, key.kind) in undecided}
    return Ledger({key: entry for key, entry in ledger.entries.items() if key not in sized})


def job_from(options: JobOptions) -> Job:
    """The job that options name, with its overrides."""
    job, changed = load_job(options.job, size=options.size), options.overrides
    if options.set:
        job = overridden(job, options.set)
    if options.growth is not None:
        changed["growth"] = parse_growth(options.growth)
    if options.scale_rule is not None:
        # The rate was tuned for the batch that the job has by itself.
        changed["base_batch"] = options.base_batch or job.base_batch or int(job.global_batch)
        changed.setdefault("warmup", job.warmup or changed.get("steps", job.steps) // WARMUP)
    if options.start_from is not None:
        job = start_from(job, options.start_from)
    return replace(job, **changed) if changed else job


def try_job(job: Job, strategy: Strategy) -> list[str] | None:
    """Runs the job's own code once in this process, on as many samples as a rank computes at once: what fails here is
    the job's. Not where ranks train on accelerators, since some models run on them only. Returns the names of the
    validation values if they are known."""
    require_uncompiled(build_without_memory(job), strategy)
    if devices_here(0).kind is not None:
        return None
    mine = job.global_batch // (strategy.replicas * strategy.micro_batches)
    # Batch norm cannot do with one sample; its statistics are those of all replicas.
    with running_eagerly():
        return require_runs(job, samples=max(mine, min(2, job.global_batch)), autocast=precision_of(strategy))


def prepare(
    job: Job,
    strategy: Strategy,
    *,
    rank: int,
    backend: str | None,
    device: Any = "cpu",
    dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
) -> Prepared:
    """Builds the model, lays the strategy over it, and makes ready to step. All ranks call it alike. State that the
    job's code keeps outside of the model is left as it was when the job was loaded."""
    if asks_for_hosts(strategy):
        strategy = by_hosts(strategy, [row["host"] for row in exchange({"host": host_of(rank)})])
    mesh = mesh_of(strategy, rank=rank, backend=backend, announce=announcer(strategy))
    on_disk = dtype is None and torch.device(device).type == "cpu" and shards_parameters(strategy)
    model = build_model(job, dtype, on_disk=on_disk).to(device)
    tried = probe(without_draws(job.optimizer), model, job.options)
    _require_schedule(job, tried)
    with leaving_pages():
        randomness = Randomness(job.seed, places_of(job, model, dtype), exact=dtype is not None)
    with Outside(job).kept():
        layout = layout_of(job, strategy)
    engine = parallelize(
        model,
        strategy,
        mesh,
        optimizer=job.optimizer,
        options=job.options,
        clip=job.clip,
        elementwise=tried.elementwise,
        coupled=tried.coupled,
        batch_norm=job.batch_norm,
        layout=layout,
        seed=job.seed,
        randomness=randomness,
        update_draws=UpdateDraws(job.seed) if draws_numbers(job.optimizer) else None,
        average=job.ema,
        bucket_bytes=bucket_bytes or BUCKET_BYTES,
    )
    modes = buffer_modes(job.buffers, model)
    engine.buffers = buffer_exchange(model, engine.placement, modes, engine.absent)
    randomness.numbers.cuts = cuts_of(engine)
    executor = executor_for(engine, strategy)
    runner = StepRunner(job, executor, strategy, randomness, autocast=precision_of(strategy), dtype=dtype)
    connect(engine, strategy, seed=job.seed, dtype=dtype)
    expected = Expected(
        job, strategy, layout, executor, dtype, full_parameters=not tried.elementwise, bucket_bytes=bucket_bytes
    )
    expected.watch()
    runner.before_step = expected.forget
    return Prepared(job, strategy, executor, runner, tried, expected)


def precision_of(strategy: Strategy) -> torch.dtype | None:
    """What matrices are multiplied in, where that is not the model's own precision."""
    term = strategy.term(amp)
    return None if term is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[term.dtype]


def shards_parameters(strategy: Strategy) -> bool:
    """Whether no rank holds the full model in memory between steps."""
    cut = any(strategy.term(axis) is not None for axis in (tp, pp, ep))
    waits = any(term.what == "parameters" for term in strategy.all_of(offload))
    return cut or waits or any(level.zero == 3 for level in strategy.dp_levels)


def _require_schedule(job: Job, optimizer: Probe) -> None:
    if not optimizer.has_lr and any(job.lr_factor(step) != 1.0 for step in range(job.steps)):
        raise JobError(
            f"job {job.name!r}: {optimizer.name} has no learning rate ('lr') in its groups, so the schedule cannot "
            "change it; leave Job.schedule out, or name the optimiser's learning rate 'lr'"
        )


def staleness(executor: Executor) -> dict[str, list[dict[int, int]]]:
    """For each stage of a pipeline without flush: updates between forward and backward -> micro-batches. Nothing for
    other strategies. All ranks call it alike."""
    mine = executor.staleness()
    if mine is None:
        return {}
    rows = exchange({"stage": executor.engine.placement.pipeline.index, "seen": mine})
    seen = {row["stage"]: row["seen"] for row in rows}
    return {"staleness": [{int(late): times for late, times in seen[stage].items()} for stage in sorted(seen)]}
