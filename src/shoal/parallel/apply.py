"""From a model and a strategy to an Engine: the terms are applied to the model one after the other.

The order matters. Everyone starts from rank 0's values; then the model is cut (tensors, experts, sequence), then what
belongs to other stages is dropped; batch norm and recomputation change what modules compute, stages wrap them, and
sharding lays its hooks around what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.compress.method import Method
from shoal.comm.group import BACKENDS
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members, Mesh
from shoal.comm.points import reach
from shoal.comm.shared_block import SharedBlock
from shoal.job.random_optimizer import UpdateDraws
from shoal.job.randomness import Randomness
from shoal.layout.blocks import units
from shoal.layout.layout import Layout
from shoal.parallel.batch_norm import count_once, synchronise
from shoal.parallel.compression import Compression
from shoal.parallel.cutting import CutModel, cut_model
from shoal.parallel.data import BUCKET_BYTES, PLAIN, Bucket, GradientReduction
from shoal.parallel.engine import Engine
from shoal.parallel.executor import Executor, PlainExecutor
from shoal.parallel.flat import FlatBuffer, StoredShard
from shoal.parallel.one_memory import OneMemory
from shoal.parallel.optimizer import Factory
from shoal.parallel.pipeline.executor import Pipeline
from shoal.parallel.pipeline.pipedream import PipeDream
from shoal.parallel.placement import Placement
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.runnable import NotRunnable, require_runnable
from shoal.parallel.sync.outer import OuterLevel
from shoal.parallel.sync.schemes import SCHEMES
from shoal.parallel.zero import ParameterGathering, ShardedUnit
from shoal.strategy import Strategy, bsp, dp, pp, recompute, shared, tp

Options = Callable[[str, torch.Tensor], dict[str, Any]]
Entry = tuple[str, nn.Parameter, int]


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    mesh: Mesh,
    *,
    optimizer: Factory,
    options: Options = lambda name, param: {},
    elementwise: bool = True,
    coupled: bool = False,
    clip: float | None = None,
    batch_norm: Literal["sync", "local"] = "sync",
    bucket_bytes: int = BUCKET_BYTES,
    layout: Layout | None = None,
    seed: int = 0,
    randomness: Randomness | None = None,
    update_draws: UpdateDraws | None = None,
) -> Engine:
    """Makes the model train by the strategy. All ranks call it alike; rank 0's values are everyone's start. The mesh is
    the engine's from then on, and is closed with it. `seed` is that of what compression draws; `randomness` has the
    rule for what the model draws, `update_draws` that for what the optimiser draws."""
    require_runnable(strategy, elementwise=elementwise, coupled=coupled)
    cutting = next((axis for axis in strategy.axes if not axis.name.startswith("dp")), None)
    if layout is None and cutting is not None:
        raise NotRunnable(f"{cutting.term}: a model is cut by its layout, and none was given; train a Job instead")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train")
    _require_host_memory(model, strategy)
    tensor = strategy.term(tp)
    placement = Placement(strategy, mesh, batch_over_tp=tensor is not None and tensor.batch)
    known: list[dict[str, Any]] = []
    labels: dict[str, int] = {}
    for name, param in model.named_parameters():
        mine = options(name, param)
        if mine not in known:
            known.append(mine)
        labels[name] = known.index(mine)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    shapes = {name: (tuple(param.shape), param.dtype) for name, param in model.named_parameters()}
    _same_start(model, placement.world)
    reach("start: same values")

    cut = cut_model(model, strategy, layout or Layout(), placement)
    replicas = placement.replicas(PLAIN)
    if batch_norm == "sync" and placement.samples.size > 1:
        synchronise(model, placement.samples)
    else:
        count_once(model)
    if randomness is not None:
        randomness.install(model)
    again = strategy.term(recompute)
    if again is not None:
        recompute_blocks(model, again.kind)
    if cut.staged is not None:
        cut.staged.install()
    for family in cut.families():
        placement.replicas(family)

    own = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    shards = _Shards(placement, cut, labels, bucket_bytes)
    if replicas.zero < 3:
        shards.buckets_of(own)
        gathering = None
    else:
        gathering = shards.units_of(model, pipelined=cut.staged is not None)
    reduction = GradientReduction(shards.buckets, every_micro=cut.staged is None)
    if gathering is not None:
        reduction.before_scatter = gathering.require_same
        reduction.on_done = {id(bucket): gathering.bucket_done(unit) for bucket, unit in shards.done_with}
        held: dict[int, list[Bucket]] = {}
        for bucket, unit in shards.done_with:
            held.setdefault(id(unit), []).append(bucket)
        gathering.close_partial = lambda unit: reduction.close_partial(held.get(id(unit), []))
    alike = placement.first_of_tensor or placement.batch_over_tp
    gathers = cut.sequence is not None and cut.sequence.gathers
    engine = Engine(
        model=model, placement=placement, reduction=reduction, gathering=gathering, factory=optimizer,
        options=known, elementwise=elementwise, clip=clip, masters=shards.masters, offsets=shards.offsets,
        names=names, labels=labels, shapes=shapes, cut=cut,
        compression=_compression(strategy, placement, shards.buckets, clip, seed),
        counts_loss=alike and (placement.context.index == 0 or not gathers),
        loss_share=1 / placement.context.size if gathers else 1.0, update_draws=update_draws,
    )  # fmt: skip
    engine.outer = _outer(strategy, engine)
    reach("start: parameters laid out")
    engine.meet()  # Ranks that share memory have each written their part of the start.
    reach("start: engine ready")
    return engine


def executor_for(engine: Engine, strategy: Strategy) -> Executor:
    """What runs the steps of an engine under a strategy. All ranks call it alike."""
    staged, term = engine.cut.staged, strategy.term(pp)
    if staged is None or term is None:
        return PlainExecutor(engine)
    kind = PipeDream if term.schedule == "pipedream" else Pipeline
    return kind(engine, staged, engine.placement.pipeline, term)


def _require_host_memory(model: nn.Module, strategy: Strategy) -> None:
    """Ranks share host memory only."""
    device = next(model.parameters()).device
    level = next((level for level in strategy.dp_levels if isinstance(level.via, shared)), None)
    if level is not None and device.type != "cpu":
        raise NotRunnable(
            f"{level}: via=shared() keeps one copy of the parameters in host memory, and this model is on "
            f"{device.type}; use via=allreduce(), or compute in host memory with SHOAL_BACKEND=shoal"
        )


def _outer(strategy: Strategy, engine: Engine) -> OuterLevel | None:
    """What ties this rank's island to others, where a level of dp is loose."""
    term = next((level.sync for level in strategy.dp_levels if not isinstance(level.sync, bsp)), None)
    if term is None:
        return None
    return SCHEMES[type(term)](term, engine.placement.islands, engine.masters, engine.model)


def _compression(
    strategy: Strategy, placement: Placement, buckets: list[Bucket], clip: float | None, seed: int
) -> Compression | None:
    if placement.compressing is None:
        return None
    term = next(axis.term for axis in strategy.axes if axis.name == placement.compressing)
    assert isinstance(term, dp)
    return Compression(buckets, Method(term.compress, clip=clip), seed=seed)


class _Shards:
    """Parameters laid into flat buffers: buckets for reduction, units for stage 3."""

    def __init__(self, placement: Placement, cut: CutModel, labels: dict[str, int], bucket_bytes: int) -> None:
        self.placement, self.cut, self.labels, self.bucket_bytes = placement, cut, labels, bucket_bytes
        self.buckets: list[Bucket] = []
        self.masters: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.done_with: list[tuple[Bucket, ShardedUnit]] = []
        self.locks: SharedBlock | None = None
        """Of replicas that share memory."""

    def buckets_of(self, params: list[tuple[str, nn.Parameter]]) -> None:
        # Backward meets parameters in the reverse of their order, so buckets are filled from the end.
        for group in self._groups(params[::-1], self.bucket_bytes):
            bucket = self._bucket(group)
            self._add(bucket, bucket.buffer.values[bucket.buffer.shard])

    def units_of(self, model: nn.Module, *, pipelined: bool) -> ParameterGathering:
        sharded_units = []
        parts = units(model)
        # Blocks from the last to the first, then the root: the order in which backward finishes them.
        for unit in [*parts[1:][::-1], parts[0]]:
            stored, own = [], []
            for group in self._groups(list(unit.params), None):
                bucket = self._bucket(group)
                stored.append(StoredShard(bucket.buffer))
                own.append(bucket)
                self._add(bucket, stored[-1].shard)
            sharded = ShardedUnit(
                unit.name, unit.module, stored, is_root=unit is parts[0],
                is_last=unit is parts[-1] and not pipelined, part=own[0].part if own else 0,
            )  # fmt: skip
            sharded_units.append(sharded)
            self.done_with += [(bucket, sharded) for bucket in own]
        sharding = self.placement.replicas(PLAIN).sharding
        by_host = None
        if next(model.parameters()).device.type != "cpu" and sharding.group is not None:
            by_host = self.placement.mesh.another_along(str(self.placement.sharded), backend=BACKENDS["shoal"])
        return ParameterGathering(sharded_units, sharding, by_host)

    def _bucket(self, group: list[Entry]) -> Bucket:
        name = group[0][0]
        family = self.cut.family(name)
        replicas = self.placement.replicas(family)
        memory = None
        if replicas.one_memory:
            self.locks = self.locks or SharedBlock(replicas.sharding, 0, keep_open=True)
            memory = OneMemory(replicas.sharding, self.locks, bucket=len(self.buckets), slots=len(group))
        shards, index = replicas.sharding.size, replicas.sharding.index
        slices = replicas.route.inside.size if replicas.route is not None else 1
        buffer = FlatBuffer(group, shards=shards, index=index, memory=memory, multiple=slices)
        return Bucket(buffer, replicas, family=family, part=self.cut.part(name), memory=memory)

    def _add(self, bucket: Bucket, master: torch.Tensor) -> None:
        self.buckets.append(bucket)
        self.masters.append(master)
        self.offsets.append(bucket.buffer.shard.start)

    def _groups(self, params: list[tuple[str, nn.Parameter]], most_bytes: int | None) -> list[list[Entry]]:
        """Consecutive parameters of one kind, up to `most_bytes` together (a larger one stands alone)."""
        open_groups: dict[Any, list[Entry]] = {}
        done: list[list[Entry]] = []
        for name, param in params:
            key = (param.dtype, param.device, self.cut.family(name), self.cut.part(name))
            group = open_groups.setdefault(key, [])
            size = sum(p.numel() * p.element_size() for _, p, _ in group)
            if group and most_bytes is not None and size + param.numel() * param.element_size() > most_bytes:
                done.append(group)
                group = open_groups[key] = []
            group.append((name, param, self.labels[name]))
        return done + [group for group in open_groups.values() if group]


def _same_start(model: nn.Module, everyone: Members) -> None:
    """Rank 0's parameters and buffers become everyone's, whatever each was built with."""
    if everyone.group is None:
        return
    tensors = [p.data for p in model.parameters()] + [b for b in model.buffers() if b.numel()]
    with BOOK.during("setup"), torch.no_grad():
        for tensor in tensors:
            whole = tensor.contiguous()
            dist.broadcast(whole, src=everyone.ranks[0], group=everyone.group)
            if whole is not tensor:
                tensor.copy_(whole)
