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
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members, Mesh
from shoal.comm.points import reach
from shoal.job.elementwise import sums_over_ranks
from shoal.job.on_disk import is_on_disk, leave_pages, to_memory
from shoal.job.random_optimizer import UpdateDraws
from shoal.job.randomness import Randomness
from shoal.layout.layout import Layout
from shoal.parallel.average import WeightAverage
from shoal.parallel.batch_norm import count_once, synchronise
from shoal.parallel.bucket import BUCKET_BYTES, Bucket
from shoal.parallel.compression import Compression
from shoal.parallel.cutting import cut_model
from shoal.parallel.engine import Engine
from shoal.parallel.executor import Executor, PlainExecutor
from shoal.parallel.loss_scale import LossScale
from shoal.parallel.noise import GradientNoise
from shoal.parallel.offload.activations import OffloadedActivations
from shoal.parallel.offload.offloading import Offloading, offloading_of
from shoal.parallel.optimizer import Factory, Recipe
from shoal.parallel.owner.kinds import owner_kind
from shoal.parallel.pipeline.executor import Pipeline
from shoal.parallel.pipeline.pipedream import PipeDream
from shoal.parallel.placement import Placement
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.runnable import NotRunnable, require_runnable
from shoal.parallel.sync.averaged import Averaged
from shoal.parallel.sync.moments import Moments
from shoal.parallel.sync.outer import NearLevel, OuterLevel
from shoal.parallel.sync.scheme import Scheme
from shoal.parallel.sync.served import ServedLevel
from shoal.parallel.sync.streams import lay_out
from shoal.strategy import Strategy, amp, cp, dp, ensemble, ep, none, pp, ps, recompute, shared, tp
from shoal.strategy.islands import is_loose
from shoal.strategy.members import member_strategy

Options = Callable[[str, torch.Tensor], dict[str, Any]]


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
    average: float | None = None,
) -> Engine:
    """Makes the model train by the strategy. All ranks call it alike; rank 0's values are everyone's start. The mesh is
    the engine's from then on, and is closed with it. `seed` is that of what compression draws; `randomness` has the
    rule for what the model draws, `update_draws` that for what the optimiser draws.
    `average`: the decay of a moving average of the weights."""
    require_runnable(strategy, elementwise=elementwise, coupled=coupled)
    if (members := strategy.term(ensemble)) is not None:
        raise NotRunnable(
            f"{members}: an engine is that of one member, and its ranks know no other; train each by "
            f"{member_strategy(strategy)} from a seed of its own, or a Job by shoal.train"
        )
    cutting = next((axis for axis in strategy.axes if not axis.name.startswith("dp")), None)
    if layout is None and cutting is not None:
        raise NotRunnable(f"{cutting.term}: a model is cut by its layout, and none was given; train a Job instead")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train")
    _require_host_memory(model, strategy)
    tensor = strategy.term(tp)
    placement = Placement(strategy, mesh, batch_over_tp=tensor is not None and tensor.batch)
    recipe = recipe_of(model, optimizer, options, elementwise=elementwise)
    names = list(recipe.labels)
    shapes = {name: (tuple(param.shape), param.dtype) for name, param in model.named_parameters()}
    same_start(model, placement.world)
    reach("start: same values")

    cut = cut_model(model, strategy, layout or Layout(), placement)
    if placement.planes.size > 1:
        placement.share_statistics(samples=batch_norm == "sync")
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

    offloading = offloading_of(strategy, next(model.parameters()).device, recipe)
    owner = owner_kind(placement)(model, placement, cut, recipe, bucket_bytes=bucket_bytes, offloading=offloading)
    to_memory(model)
    alike = placement.first_of_tensor or placement.batch_over_tp
    gathers = cut.sequence is not None and cut.sequence.gathers
    whole_loss = (placement.context.size if gathers else 1) * placement.planes.size
    engine = Engine(
        model=model,
        placement=placement,
        owner=owner,
        clip=clip,
        names=names,
        shapes=shapes,
        cut=cut,
        compression=_compression(strategy, placement, owner.buckets, clip, seed),
        counts_loss=alike and (placement.context.index == 0 or not gathers) and placement.planes.index == 0,
        loss_share=1 / whole_loss,
        update_draws=update_draws,
    )
    _require_offloadable(engine, offloading)
    _require_vectors(engine, strategy)
    if (level := offloading.levels.get("activations")) is not None:
        kept = [bucket.buffer.values for bucket in owner.buckets]
        moved = OffloadedActivations(level, lambda: (*kept, *model.parameters(), *model.buffers()))
        engine.activations, offloading.in_use["activations"] = moved, lambda: moved.on_way_bytes
    engine.outer = _outer(strategy, engine, seed)
    if (precision := strategy.term(amp)) is not None and precision.dtype == "fp16":
        if engine.optimizer.needs_closure:
            raise NotRunnable(f'{precision}: the optimiser computes the loss again in its step; use amp("bf16")')
        engine.scale_of_loss = LossScale()
    if average is not None:
        _require_average(strategy)
        engine.average = WeightAverage(owner, average)
    if _noise_is_seen(engine, strategy):
        engine.reduction.noise = GradientNoise(counts=placement.first_of_tensor)
        engine.reduction.holders = {family: placement.multiplicity(family) for family in cut.families()}
    reach("start: parameters laid out")
    owner.barrier()  # Ranks that share memory have each written their part of the start.
    reach("start: engine ready")
    return engine


def _require_vectors(engine: Engine, strategy: Strategy) -> None:
    """Refuses axes under which an optimiser's vectors over all parameters are not simply in pieces."""
    if not sums_over_ranks(engine.optimizer.optimizer):
        return
    for term in strategy.terms:
        loose = is_loose(term) or (isinstance(term, dp) and isinstance(term.via, ps | shared))
        if loose or isinstance(term, (pp, tp, cp, ep)):
            name = type(engine.optimizer.optimizer).__name__
            raise NotRunnable(
                f"{term}: {name} sums over ranks that shard the parameters; use bsp levels of dp, with any zero"
            )


def _require_offloadable(engine: Engine, offloading: Offloading) -> None:
    """Refuses what a step in parts cannot do."""
    if not {"optimizer", "parameters"} & offloading.levels.keys():
        return
    what = next(what for what in ("optimizer", "parameters") if what in offloading.levels)
    name = type(engine.optimizer.optimizer).__name__
    for asks, why in (
        (engine.optimizer.needs_closure, "computes the loss several times in a step"),
        (engine.update_draws is not None, "draws random numbers for all parameters in a step"),
    ):
        if asks:
            raise NotRunnable(
                f'offload("{what}"): a step moves what it needs part by part, and {name} {why}; use another, such as '
                "AdamW, or leave it out"
            )


def _require_average(strategy: Strategy) -> None:
    """Refuses an average of weights that no rank updates by itself."""
    for level in strategy.dp_levels:
        if is_loose(level) or isinstance(level.via, ps):
            raise NotRunnable(
                f"{level}: ema averages the weights of ranks that step together, and here islands or servers hold "
                "different ones; leave ema out"
            )
    term = strategy.term(pp)
    if term is not None and term.schedule == "pipedream":
        raise NotRunnable(f"{term}: ema needs one version of the weights, and pipedream has several; leave ema out")


def recipe_of(model: nn.Module, optimizer: Factory, options: Options, *, elementwise: bool) -> Recipe:
    """How the optimiser of a model is built, from the model before it is cut."""
    known: list[dict[str, Any]] = []
    labels: dict[str, int] = {}
    for name, param in model.named_parameters():
        mine = options(name, param)
        if mine not in known:
            known.append(mine)
        if param.requires_grad:
            labels[name] = known.index(mine)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters() if param.requires_grad}
    return Recipe(factory=optimizer, options=known, labels=labels, elementwise=elementwise, shapes=shapes)


def _noise_is_seen(engine: Engine, strategy: Strategy) -> bool:
    """Whether each rank sees gradients of its own micro-batches, and there are several in a step. Not where stages or
    parts of a sequence see pieces of one, nor where gradients are written to shared memory or compressed."""
    place = engine.placement
    several = place.samples.size * strategy.micro_batches > 1
    cutting = place.pipeline.size * place.context.size * place.experts.size * place.planes.size
    pieces = cutting > 1 or bool(engine.cut.partial)
    return several and not pieces and engine.owner.private_gradients and engine.compression is None


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


def _outer(strategy: Strategy, engine: Engine, seed: int) -> OuterLevel | None:
    """What ties this rank's island to others, where a level of dp is loose."""
    loose = next((level for level in strategy.dp_levels if is_loose(level)), None)
    if loose is None:
        return None
    if engine.placement.seats is not None or engine.placement.hogwild is not None:
        return ServedLevel(engine.placement, engine.model)
    level = _level(OuterLevel, loose, engine, seed)
    if engine.placement.near is not None:
        inner = [other for other in strategy.dp_levels if is_loose(other)][-1]
        level.near = _level(NearLevel, inner, engine, seed)
    return level


def _level(kind: type[OuterLevel], loose: dp, engine: Engine, seed: int) -> Any:
    term = loose.sync
    assert isinstance(term, Scheme), f"{term} has no runtime"
    level = kind(term, engine.placement, engine.buckets, engine.model, engine.names)
    level.consistency = engine.consistency
    level.reset_optimizer = engine.owner.reset
    if isinstance(term, Averaged):
        if term.plan.state == "averaged":
            level.moments = Moments(level, engine.owner.recipe, lambda: engine.owner.optimizer)
        lay_out(term, level, None if isinstance(loose.compress, none) else Method(loose.compress), seed=seed)
    return level


def _compression(
    strategy: Strategy, placement: Placement, buckets: list[Bucket], clip: float | None, seed: int
) -> Compression | None:
    if placement.compressing is None:
        return None
    term = next(axis.term for axis in strategy.axes if axis.name == placement.compressing)
    assert isinstance(term, dp)
    return Compression(buckets, Method(term.compress, clip=clip), seed=seed)


def same_start(model: nn.Module, everyone: Members) -> None:
    """Rank 0's parameters and buffers become everyone's, whatever each was built with."""
    if everyone.group is None:
        return
    tensors = [p.data for p in model.parameters()] + [b for b in model.buffers() if b.numel()]
    with BOOK.during("setup"), torch.no_grad():
        for tensor in tensors:
            full = tensor.contiguous()
            dist.broadcast(full, src=everyone.ranks[0], group=everyone.group)
            if full is not tensor:
                tensor.copy_(full)
            if is_on_disk(tensor):
                leave_pages()
