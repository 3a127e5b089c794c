"""What a rank is expected to send in a step: the formulas of `estimate`, on what the layout and the batch show.

Nothing here is read off a running engine but what only a run can know: which parameters had no gradient in a step that
compresses, how routers of a mixture of experts decided (`routing.py`, `regions_seen.py`), which blocks a model has left
out (`blocks_seen.py`), what attention written by hand gathers under cp, and how often others asked an island
(asynchronous gossip).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from shoal.estimate.attention_traffic import attention_calls
from shoal.estimate.axis_calls import axis_calls, buffer_calls
from shoal.estimate.held import Held
from shoal.estimate.outer_calls import outer_calls
from shoal.estimate.server_calls import server_calls
from shoal.estimate.shard_table import shard_table
from shoal.estimate.tensor_traffic import crossing_calls
from shoal.estimate.traffic import Call, Group, ShardTable
from shoal.job import Batch, Job
from shoal.layout.blocks import units
from shoal.layout.forward import Forward, JobShapes
from shoal.layout.layout import Layout
from shoal.layout.observe import job_shapes, observe
from shoal.parallel.engine import Engine
from shoal.parallel.executor import Executor
from shoal.parallel.pipeline.executor import Pipeline
from shoal.runtime.blocks_seen import BlocksSeen
from shoal.runtime.float64 import KeepFloat64
from shoal.runtime.regions_seen import RegionsSeen
from shoal.runtime.routing import Routing
from shoal.strategy import Strategy, amp, cp, pp, spatial


@dataclass
class Expected:
    """The traffic of one rank's steps, from the job, its layout and the strategy."""

    job: Job
    strategy: Strategy
    layout: Layout
    executor: Executor
    dtype: torch.dtype | None = None
    full_parameters: bool = False
    """Whether the job's optimiser needs them."""
    bucket_bytes: int | None = None
    """If not the usual ones."""
    routing: Routing | None = None
    regions: RegionsSeen | None = None
    blocks: BlocksSeen | None = None
    _forwards: dict[Any, Forward] = field(default_factory=dict)
    """By the shapes of a micro-batch."""

    @property
    def engine(self) -> Engine:
        return self.executor.engine

    def watch(self) -> None:
        """Puts hooks where data decide what is sent, so that the prediction can be made from what they see."""
        experts, model = self.layout.experts, self.engine.model
        if experts is not None and self.engine.placement.experts.size > 1:
            self.routing = Routing(self.engine.placement.experts)
            self.routing.watch(model, [layer for layer in experts.layers if self.held.runs(layer.owner)])
        if self.layout.chooses and self.engine.placement.tensor.size > 1:
            self.regions = RegionsSeen(model, self.held)
        if any(level.zero == 3 for level in self.strategy.dp_levels) and not self.engine.pipelined:
            self.blocks = BlocksSeen(model, [unit.name for unit in units(model) if unit.name])

    def forget(self) -> None:
        """Before a step: what was seen until now (in an evaluation) is not the step's."""
        cut = self.engine.cut
        cut.crossings.take()
        if isinstance(self.executor, Pipeline):
            self.executor.borders.forget()
        if cut.sequence is not None:
            cut.sequence.take()
        for seen in (self.routing, self.regions, self.blocks):
            if seen is not None:
                seen.forget()

    @cached_property
    def shapes(self) -> JobShapes:
        term = self.strategy.term(pp)
        stages = () if term is None else (term.n * term.chunks,)
        return job_shapes(self.job, self.layout, stages=stages, dtype=self.dtype, full_parameters=self.full_parameters)

    @cached_property
    def held(self) -> Held:
        found, outer = Held(self.shapes, self.strategy, self.engine.placement.mesh.rank), self.engine.outer
        for level in (outer, None if outer is None else outer.near):
            if level is not None and level.moments is not None:
                found.moments = level.moments.counts
        return found

    def forward(self, batch: Batch) -> Forward:
        """The serial forward of a micro-batch of these shapes."""
        key = tuple((name, tuple(entry.shape), entry.dtype) for name, entry in batch.items())
        if key not in self._forwards:
            narrow = self.strategy.term(amp) is not None
            cut = self.strategy.term(spatial)
            around = KeepFloat64 if self.dtype == torch.float64 else nullcontext
            self._forwards[key] = observe(
                self.job,
                batch,
                dtype=self.dtype,
                autocast=narrow,
                real=self._real,
                around=around,
                planes=(1, 1) if cut is None else cut.grid,
            )
        return self._forwards[key]

    @property
    def _real(self) -> bool:
        return self.strategy.term(cp) is not None

    def table(self, batches: Sequence[Batch], total: int) -> ShardTable:
        """For a step of these micro-batches, of a global batch of `total` samples. Collective where experts are
        split: how many tokens come from others, only they know."""
        forwards = [self.forward(batch) for batch in batches]
        compression = self.engine.compression
        found = shard_table(
            self.held,
            self.strategy,
            forwards[0],
            calls=list(self._calls(forwards, total)),
            step=0 if compression is None else compression.step - 1,
            unused=() if compression is None else compression.unused,
            method=None if compression is None else compression.method,
            gathers=self.blocks.gathers if self.blocks is not None and self.blocks.any else None,
            bucket_bytes=self.bucket_bytes,
        )
        if self.held.placing.seats is not None:
            remote = self.engine.owner.remote
            number = remote.codec.step - 1 if remote is not None and remote.codec is not None else 0
            return replace(found, calls=(*found.calls, *server_calls(self.held, found, step=number)))
        last, asked, moved, outer = max(0, self.engine.clock - 1), 0, None, self.engine.outer
        if outer is not None and outer.pairs is not None:
            last, asked = max(0, outer.pairs.clock - 1), outer.pairs.asked
        if outer is not None and outer.tickets is not None:
            moved = outer.tickets.moved
        return replace(found, calls=(*found.calls, *outer_calls(self.held, found, last, asked=asked, moved=moved)))

    def _calls(self, forwards: Sequence[Forward], total: int) -> Iterator[Call]:
        placed = axis_calls(self.held, forwards, total=total, regions=self.regions is None)
        yield from (call for _, call in placed)
        if self.regions is not None:
            yield from self.regions.calls()
        yield from buffer_calls(self.held)
        if self.routing is not None:
            yield from self.routing.calls(forwards[0])
        sequence = self.engine.cut.sequence
        if sequence is not None:
            context = self.engine.placement.context
            group = Group(axis=context.axis, ranks=context.size)
            yield from attention_calls(sequence.calls_in_views, sequence.method, group)
            for crossing in sequence.gathered_in_views:
                yield from crossing_calls(group, {crossing: 1})
