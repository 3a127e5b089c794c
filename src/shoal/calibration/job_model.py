"""Reads a job into the plain `JobModel` that a step is estimated from: one forward without memory, its layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from torch import nn

from shoal.analysis.traced import network_of_trace
from shoal.estimate.steps.model import JobModel, PlaneModel, StagePiece
from shoal.estimate.steps.operations import operations
from shoal.job import Job
from shoal.job.facts import build_without_memory
from shoal.job.groups import param_groups
from shoal.layout.chain import StageCutError
from shoal.layout.layout import Layout, facts_of, layout_of
from shoal.layout.observe import job_shapes, observe
from shoal.layout.spatial.foresee import CannotCutPlanes, spatial_plan
from shoal.layout.trace import trace
from shoal.strategy import ModelFacts, Strategy, spatial

MOST_STAGES = 16
TRACED = 4
"""Samples of the traced forward: all that grows with them is proportional."""


def job_model(job: Job, *, planes: Sequence[spatial] = ()) -> tuple[JobModel, ModelFacts]:
    """What is estimated of a job, and what legality asks of it. `planes`: the ways to cut its planes that are to be
    estimated too."""
    layout = layout_of(job)
    assert layout.chain is not None
    assert layout.tensor is not None
    samples = min(TRACED, len(job.train))
    recorded = trace(job, samples=samples)
    model = build_without_memory(job)
    links = layout.chain.links
    sizes = {name: param.numel() * param.element_size() for name, param in model.named_parameters()}
    taken: set[str] = set()
    pieces = []
    for link in links:
        own = sorted(link.parameters - taken)
        taken |= link.parameters
        pieces.append(
            StagePiece(name=link.path, is_block=link.is_block, parameter_bytes=sum(sizes.get(name, 0) for name in own))
        )
    words = layout.tensor.vocabulary
    facts = facts_of(job, layout)
    shapes = job_shapes(
        job, layout, stages=_possible_stages(layout), full_parameters=facts.elementwise_optimizer is False
    )
    return (
        JobModel(
            name=job.name,
            global_batch=job.global_batch,
            samples=samples,
            operations=operations(network_of_trace(recorded, name=job.name)),
            pieces=tuple(pieces),
            tensor_cut=_tensor_cut(layout),
            loss_cut=words is not None and words.loss_parallel,
            context_loss_cut=layout.context is not None and layout.context.batch is not None,
            optimizer=_optimizer(job, model),
            shapes=shapes,
            forward=observe(job),
            planes=_planes(job, layout, planes),
        ),
        facts,
    )


def plane_cuts_of(strategies: Iterable[Strategy]) -> list[spatial]:
    """The ways in which strategies cut planes."""
    return [term for strategy in strategies if (term := strategy.term(spatial)) is not None]


def _planes(job: Job, layout: Layout, ways: Sequence[spatial]) -> dict[tuple[int, int], PlaneModel]:
    found = {}
    for grid in {way.grid for way in ways if way.n > 1} if layout.spatial is not None else ():
        with contextlib.suppress(CannotCutPlanes):
            plan = spatial_plan(job, grid, min(TRACED, len(job.train)))
            found[grid] = PlaneModel(forward=observe(job, planes=grid), modules=plan.modules)
    return found


def _possible_stages(layout: Layout) -> tuple[int, ...]:
    found = []
    for num in range(1, MOST_STAGES + 1):
        with contextlib.suppress(StageCutError):
            layout.stages(num)
            found.append(num)
    return tuple(found)


def _tensor_cut(layout: Layout) -> dict[str, str]:
    assert layout.tensor is not None
    found: dict[str, str] = {}
    for region in layout.tensor.regions:
        found |= dict.fromkeys(region.columns, "columns") | dict.fromkeys(region.rows, "inner")
    if layout.tensor.vocabulary is not None:
        found |= dict.fromkeys(layout.tensor.vocabulary.heads, "columns")
    return found


def _optimizer(job: Job, model: nn.Module) -> str:
    return type(job.optimizer(param_groups(model, job.options))).__name__
