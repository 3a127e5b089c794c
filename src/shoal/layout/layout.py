"""`Layout`: how a job's model can be partitioned. Its pieces and where a pipeline can cut between them, the projections
that tensor parallelism can split, the sequence, the experts. Inferred from one traced forward; declarations of the job
take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shoal.job import Job, LayoutHints, infer_facts
from shoal.job.facts import build_without_memory
from shoal.layout.chain import Chain, chain
from shoal.layout.context.find import context_plan
from shoal.layout.context.loss_trial import loss_trial
from shoal.layout.context.plan import CannotCutSequence, ContextPlan, named
from shoal.layout.experts.find import PassedOver, Survey, survey_experts
from shoal.layout.experts.signs import may_hold_experts
from shoal.layout.recorded import Trace
from shoal.layout.spatial.foresee import NO_CONVOLUTION, CannotCutPlanes, spatial_plan
from shoal.layout.spatial.plan import SpatialPlan
from shoal.layout.tensor.plan import TensorPlan
from shoal.layout.tensor.roles import tensor_plan
from shoal.layout.tensor.tokens import stream_blocks
from shoal.layout.trace import SAMPLES, trace
from shoal.strategy import ModelFacts, Strategy, cp, ep, pp, spatial, tp


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model can be partitioned. None: not asked for."""

    chain: Chain | None = None
    balanced: bool = True
    """Whether stages are balanced by estimated cost, or by the number of pieces."""
    borders: tuple[str, ...] | None = None
    """Pieces that start a pipeline stage, as the job declares; None: cuts that balance the stages."""
    tensor: TensorPlan | None = None
    context: ContextPlan | None = None
    why_no_context: str = ""
    spatial: SpatialPlan | None = None
    why_no_spatial: str = ""
    experts: Survey | None = None
    chooses: bool = False
    """Whether the model's code branches on values, so that its operations depend on the data (a mixture of experts)."""

    def stages(self, num: int) -> list[tuple[int, int]]:
        assert self.chain is not None
        return self.chain.stages(num, balanced=self.balanced, declared=self.borders)


def layout_of(job: Job, strategy: Strategy | None = None) -> Layout:
    """The parts of the Layout that the strategy needs; without one, all of it. `job.layout` takes precedence."""
    hints = job.layout or LayoutHints()

    def wanted(cls: type[Any]) -> bool:
        return strategy is None or strategy.term(cls) is not None

    if not any(wanted(cls) for cls in (pp, tp, cp, ep, spatial)):
        return Layout()
    samples = SAMPLES
    if strategy is not None:
        samples = max(SAMPLES, job.global_batch // (strategy.replicas * strategy.micro_batches))
    traced = trace(job, samples=samples) if wanted(pp) or wanted(tp) or wanted(cp) else None
    tensor = strategy.term(tp) if strategy is not None else None
    over_samples = tensor is not None and tensor.batch
    chooses = traced is not None and not traced.fake
    experts = _experts(job, traced) if wanted(ep) or ((wanted(cp) or over_samples) and chooses) else None
    context, why = None, ""
    if wanted(cp):
        assert traced is not None
        try:
            batch = job.train.batch(np.arange(min(samples, len(job.train))))
            context = context_plan(traced, by_position=_by_position(experts), trial=loss_trial(job, traced, batch))
        except CannotCutSequence as refusal:
            why = str(refusal)
    planes, why_no_planes = _planes(job, strategy, samples, traced)
    layout = Layout(
        chain=chain(traced) if traced is not None and wanted(pp) else None,
        balanced=hints.balanced,
        borders=hints.stages,
        tensor=tensor_plan(traced, declared=hints.roles) if traced is not None and wanted(tp) else None,
        context=context,
        why_no_context=why,
        spatial=planes,
        why_no_spatial=why_no_planes,
        experts=experts if hints.experts else _kept_together(experts),
        chooses=chooses,
    )
    if over_samples and experts is not None and layout.tensor is not None:
        layout = replace(layout, tensor=_without_experts(layout.tensor, experts))
    pipeline = strategy.term(pp) if strategy is not None else None
    if pipeline is not None and hints.stages is not None:
        layout.stages(pipeline.n * pipeline.chunks)  # Refuses wrong declarations before ranks start.
    return layout


def _planes(job: Job, strategy: Strategy | None, samples: int, traced: Trace | None) -> tuple[SpatialPlan | None, str]:
    """How planes are cut; without a strategy, in two."""
    term = spatial(2) if strategy is None else strategy.term(spatial)
    if term is None or term.n == 1:
        return None, ""
    if traced is not None and not any(op.name == "convolution" for op in traced.ops):
        return None, NO_CONVOLUTION
    try:
        return spatial_plan(job, term.grid, samples), ""
    except CannotCutPlanes as refusal:
        return None, str(refusal)


def _without_experts(plan: TensorPlan, experts: Survey) -> TensorPlan:
    """With batch=True each rank has its own samples and routes a different number of them to an expert, so expert
    layers cannot be gathered across ranks."""
    owners = tuple(f"{layer.owner}." for layer in experts.layers)
    inside = [region for region in plan.regions if region.columns[0].startswith(owners)]
    why = "each rank routes a different number of samples to it, but batch=True gathers equal numbers"
    whole = {path: why for region in inside for path in (*region.columns, *region.rows)}
    return replace(plan, regions=tuple(r for r in plan.regions if r not in inside), whole={**plan.whole, **whole})


def _kept_together(experts: Survey | None) -> Survey | None:
    """The survey of a job that declares experts=False."""
    if experts is None:
        return None
    whole = tuple(
        PassedOver(path=layer.path, reason=f"{layer.path}: the job declares experts=False") for layer in experts.layers
    )
    return Survey(layers=(), passed_over=(*whole, *experts.passed_over))


def _experts(job: Job, traced: Trace | None) -> Survey:
    """Which experts are chosen depends on values, so this runs a few real samples."""
    if traced is not None and not may_hold_experts(traced):
        return Survey(layers=(), passed_over=())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = job.model()
        batch = job.train.batch(np.arange(min(SAMPLES, len(job.train))))
        return survey_experts(model, lambda: job.run_model(model, batch))


def _by_position(experts: Survey | None) -> list[str]:
    """Expert layers treat each position on its own, whatever their code looks like."""
    return [layer.owner for layer in experts.layers] if experts is not None else []


def _why_no_tensor(job: Job, plan: TensorPlan) -> str:
    """The reason of the module that holds most parameters: the others matter less."""
    if not plan.whole:
        return "it has no projections"
    model = build_without_memory(job)
    modules = dict(model.named_modules())

    def size(path: str) -> int:
        return sum(param.numel() for param in modules[path].parameters()) if path in modules else 0

    path = max(plan.whole, key=size)
    return f"{named(model, path)}: {plan.whole[path]}"


def _why_not_within(context: ContextPlan, stream: tuple[str, ...]) -> str:
    """tp splits the residual stream inside cp's range of blocks, so it must not begin earlier or end later."""
    if context.in_root:
        return "the model's own forward works on the sequence between its blocks, where cp cuts it and tp cannot"
    if not stream or stream[0] not in context.blocks:
        first = stream[0] if stream else "the model"
        return f"tp begins at {first} and cp at {context.blocks[0]}, the first block that attends"
    if context.batch is None and stream[-1] not in context.blocks:
        return f"tp ends at {stream[-1]} and cp at {context.blocks[-1]}, the last block that attends"
    return ""


def facts_of(job: Job, layout: Layout) -> ModelFacts:
    """What legality needs to know: the facts of the model, and what its layout adds to them."""
    facts = infer_facts(job)
    if layout.chain is not None:
        facts = replace(facts, layers=len(layout.chain.cuts()) + 1, layers_why=layout.chain.why_not_more())
    if layout.tensor is not None:
        regions = layout.tensor.regions
        parts = tuple((region.columns[0], region.kind, region.parts) for region in regions)
        if layout.tensor.vocabulary is not None:
            # The vocabulary may be split unevenly, so any number of ranks is legal.
            parts += (((layout.tensor.vocabulary.heads or layout.tensor.vocabulary.embeddings)[0], "words", 0),)
        why = "" if parts else _why_no_tensor(job, layout.tensor)
        no_sequence = "" if layout.tensor.sequence_dim is not None else layout.tensor.why_no_sequence
        tokens = layout.tensor.tokens or facts.sequence
        if facts.heads is None:
            # Attention that keeps no number of heads in an attribute shows it in its region.
            found = max((count for _, kind, count in parts if kind == "heads"), default=0)
            facts = replace(facts, heads=found or None, kv_heads=facts.kv_heads or found or None)
        facts = replace(facts, tensor_parts=parts, tensor_why=why, sequence_why=no_sequence, sequence=tokens)
    if layout.why_no_context:
        facts = replace(facts, context_why=layout.why_no_context)
    if layout.why_no_spatial:
        facts = replace(facts, spatial_why=layout.why_no_spatial)
    if layout.context is not None:
        facts = replace(facts, sequence=layout.context.length)
        if layout.context.in_root:
            why = "the model's own forward works on the sequence between its blocks"
            facts = replace(facts, context_in_stages_why=why)
        if layout.tensor is not None and layout.tensor.sequence_dim is not None:
            why = _why_not_within(layout.context, stream_blocks(build_without_memory(job), layout.tensor))
            facts = replace(facts, sequence_under_cp_why=why)
    if layout.experts is not None:
        counts = [layer.count for layer in layout.experts.layers]
        passed = next((row.reason for row in layout.experts.passed_over), "")
        facts = replace(facts, experts=int(np.gcd.reduce(counts)) if counts else 0, experts_why=passed)
    return facts
