"""The axes that cut the model itself, laid over it one after the other: stages, tensors, experts, the sequence, planes.

Each names which parameters it has cut or taken away; from that every parameter's family follows, and with it over which
ranks its gradient is summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from shoal.layout.crossings import Tally
from shoal.layout.cuts import Cut
from shoal.layout.layout import Layout
from shoal.layout.tensor.plan import TensorPlan
from shoal.layout.tensor.tokens import stream_blocks
from shoal.parallel.bucket import SHARED
from shoal.parallel.context.cut import SequenceCut
from shoal.parallel.expert.shard_experts import shard_experts
from shoal.parallel.pipeline.stages import StagedModel
from shoal.parallel.placement import Family, Placement
from shoal.parallel.runnable import NotRunnable
from shoal.parallel.spatial.cut import PlaneCut
from shoal.parallel.tensor.cut import cut_tensors, split_stream
from shoal.parallel.tensor.regions import Between
from shoal.parallel.tensor.vocabulary import cut_vocabulary
from shoal.strategy import Strategy, cp, ep, pp, spatial, tp
from shoal.strategy.schedule import rank_stages, stage_rank


@dataclass
class CutModel:
    """What the axes have made of a model."""

    cuts: dict[str, Cut] = field(default_factory=dict)
    """Parameters and buffers that are cut, by name."""
    partial: set[str] = field(default_factory=set)
    """Uncut parameters of which each rank of tp sees part of the gradient."""
    experts: set[str] = field(default_factory=set)
    """Parameters of experts, also those that other ranks hold."""
    stacks: set[str] = field(default_factory=set)
    """Those of them that hold several experts, and are cut among the ranks of ep."""
    absent: set[str] = field(default_factory=set)
    """Parameters and buffers that other ranks hold."""
    staged: StagedModel | None = None
    stage_ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> the ranks along pp that hold it."""
    crossings: Tally = field(default_factory=Tally)
    """What crossed the ranks of tp."""
    sequence: SequenceCut | None = None
    planes: PlaneCut | None = None

    def family(self, name: str) -> Family:
        stages = self.stage_ranks.get(name, ())
        return Family(
            cut=name in self.cuts and name not in self.stacks,
            partial=name in self.partial,
            expert=name in self.experts,
            stages=stages if len(stages) > 1 else (),
        )

    def families(self) -> list[Family]:
        """All that may occur on any rank, in one order: their groups are made by all ranks together."""
        stages = sorted({(), *(held for held in self.stage_ranks.values() if len(held) > 1)})
        return [
            Family(cut=cut, partial=partial, expert=expert, stages=held)
            for held in stages
            for expert in (False, True)
            for cut, partial in ((False, False), (True, False), (False, True))
        ]

    def part(self, name: str) -> int:
        """Which of this rank's stages a parameter belongs to. What several ranks hold is reduced after all stages of
        each: they come to it in different orders."""
        if self.staged is None:
            return 0
        if len(self.staged.mine) > 1 and self.family(name).stages:
            return SHARED
        mine = [n for n, stage in enumerate(self.staged.mine) if stage in self.staged.holders(name)]
        return mine[0] if len(mine) == 1 else SHARED

    def is_here(self, names: Iterable[str]) -> bool:
        return not any(name in self.absent for name in names)


def cut_model(model: nn.Module, strategy: Strategy, layout: Layout, placement: Placement) -> CutModel:
    """Keeps this rank's part of the model. All ranks call it alike, with equal models."""
    cut = CutModel()
    _stages(cut, model, strategy, layout, placement)
    _tensors(cut, model, strategy, layout, placement)
    _experts(cut, model, strategy, layout, placement)
    _sequence(cut, model, strategy, layout, placement)
    _stream(cut, model, strategy, layout, placement)
    _planes(cut, model, strategy, layout, placement)
    return cut


def _stages(cut: CutModel, model: nn.Module, strategy: Strategy, layout: Layout, placement: Placement) -> None:
    term = strategy.term(pp)
    if term is None:
        return
    assert layout.chain is not None
    shared = next((name for name, change in layout.chain.written.items() if not change.own), None)
    if term.chunks > 1 and shared is not None:
        raise NotRunnable(
            f"{term}: the model's forward changes the buffer {shared} outside its blocks, and the {term.chunks} stages "
            "of a rank would each do so; use chunks=1, or change the buffer inside a block"
        )
    stages = layout.stages(term.n * term.chunks)
    mine = rank_stages(placement.pipeline.index, term.n, term.chunks, term.schedule)
    cut.staged = StagedModel(model, layout.chain, stages, mine)
    cut.absent |= cut.staged.absent
    for name, _ in model.named_parameters():
        ranks = {stage_rank(stage, term.n, term.chunks, term.schedule) for stage in cut.staged.holders(name)}
        cut.stage_ranks[name] = tuple(sorted(ranks))


def _tensors(cut: CutModel, model: nn.Module, strategy: Strategy, layout: Layout, placement: Placement) -> None:
    term = strategy.term(tp)
    if term is None or term.n == 1:
        return
    assert layout.tensor is not None
    plan = _here(cut, layout.tensor)
    between: Between = "sequence" if term.sequence else "batch" if placement.batch_over_tp else "whole"
    # The stream does not end with a stage's last region: a block behind it computes on cut positions, too.
    stream = stream_blocks(model, layout.tensor)
    done = cut_tensors(model, plan, placement.tensor, between=between, tally=cut.crossings, stream=stream)
    cut.cuts |= done.cuts
    cut.partial |= done.partial
    if plan.vocabulary is not None and between != "batch":
        words = cut_vocabulary(model, plan.vocabulary, placement.tensor, tally=cut.crossings)
        cut.cuts |= words.cuts
        cut.partial -= set(words.cuts)


def _here(cut: CutModel, plan: TensorPlan) -> TensorPlan:
    """What of a plan lies in this rank's stages."""
    if cut.staged is None:
        return plan
    regions = tuple(region for region in plan.regions if cut.is_here(region.cuts))
    words = plan.vocabulary
    if words is not None:
        names = {name: how for name, how in words.cuts.items() if name not in cut.absent}
        runs = cut.staged.runs
        words = replace(
            words,
            cuts=names,
            embeddings=tuple(p for p in words.embeddings if runs(p)),
            heads=tuple(p for p in words.heads if runs(p)),
        )
    return replace(plan, regions=regions, vocabulary=words if words is not None and words.cuts else None)


def _stream(cut: CutModel, model: nn.Module, strategy: Strategy, layout: Layout, placement: Placement) -> None:
    """With sequence=True: the stream is cut at the first block, after cp has cut it, and gathered behind the last."""
    term = strategy.term(tp)
    if term is None or term.n == 1 or not term.sequence:
        return
    assert layout.tensor is not None
    assert layout.tensor.sequence_dim is not None
    along = stream_blocks(model, layout.tensor)
    runs = cut.staged.runs if cut.staged is not None else lambda path: True
    first, last = (path if runs(path) else None for path in (along[0], along[-1]))
    split_stream(model, first, last, layout.tensor.sequence_dim, placement.tensor, cut.crossings)


def _experts(cut: CutModel, model: nn.Module, strategy: Strategy, layout: Layout, placement: Placement) -> None:
    term = strategy.term(ep)
    if term is None or term.n == 1:
        return
    assert layout.experts is not None
    before = {name for name, _ in model.named_parameters()}
    mine = [layer for layer in layout.experts.layers if cut.is_here(layer.parameter_names)]
    shard_experts(model, mine, placement.experts)
    cut.absent |= before - {name for name, _ in model.named_parameters()}
    for layer in layout.experts.layers:
        cut.experts |= set(layer.parameter_names)
        if layer.form == "stacked":
            cut.stacks |= set(layer.parameter_names)
            cut.cuts |= {name: Cut(0, (layer.count,)) for name in layer.parameter_names}


def _sequence(cut: CutModel, model: nn.Module, strategy: Strategy, layout: Layout, placement: Placement) -> None:
    term = strategy.term(cp)
    if term is None or term.n == 1:
        return
    assert layout.context is not None
    local = [path for path in layout.context.blocks if cut.staged is None or cut.staged.runs(path)]
    cut.sequence = SequenceCut(model, layout.context, placement.context, term.method, local=local)


def _planes(cut: CutModel, model: nn.Module, strategy: Strategy, layout: Layout, placement: Placement) -> None:
    term = strategy.term(spatial)
    if term is None or term.n == 1:
        return
    assert layout.spatial is not None
    cut.planes = PlaneCut(model, term.grid, placement)
    if cut.staged is not None:
        cut.staged.in_full = cut.planes.view.inside
        cut.staged.arrived = cut.planes.arrived(layout.spatial, [link.path for link in cut.staged.chain.links])
