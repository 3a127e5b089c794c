"""A Layout as a plain object: what `shoal explain JOB` prints, and what `--json` gives.

Pieces are named by path, costs are fractions of the model's forward, bytes are those of one sample. Identical
neighbouring blocks are one entry, so that a model of a hundred layers takes one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile
from math import prod
from typing import Any

from torch import nn

from shoal.job import Job
from shoal.job.facts import build_without_memory
from shoal.layout.chain import Chain, ModelPiece, StageCutError
from shoal.layout.context.plan import ContextPlan
from shoal.layout.experts.find import Survey
from shoal.layout.layout import Layout, facts_of, layout_of
from shoal.layout.spatial.plan import SpatialPlan
from shoal.layout.tensor.plan import TensorPlan
from shoal.layout.tensor.text import plan_lines
from shoal.layout.trace import SAMPLES
from shoal.strategy import Strategy, check, pp
from shoal.strategy.schedule import stage_rank

STAGES_SHOWN = (2, 4)


def describe(job: Job, layout: Layout) -> dict[str, Any]:
    """Everything in a layout that `layout_of(job)` returned."""
    assert layout.chain is not None
    assert layout.tensor is not None
    assert layout.experts is not None
    model = build_without_memory(job)
    samples = min(SAMPLES, len(job.train))
    pieces = _pieces(layout.chain, model, samples)
    blocks = [number for number, piece in enumerate(pieces) if piece["is_block"]]
    first, stop = (blocks[0], blocks[-1] + 1) if blocks else (len(pieces), len(pieces))
    return {
        "job": job.name,
        "model": type(model).__name__,
        "parameters": sum(param.numel() for param in model.parameters()),
        "declared": _declared(job),
        "pieces": pieces,
        "prefix": _groups(pieces[:first], model),
        "blocks": _groups(pieces[first:stop], model),
        "suffix": _groups(pieces[stop:], model),
        "cuts": len(layout.chain.cuts()),
        "no_cut_before": {link.path: link.why_not for link in layout.chain.links[1:] if link.why_not},
        "tied": _tied(layout.chain),
        "stages": {str(len(rows)): rows for rows in _stage_tables(layout)},
        "tensor": _tensor(layout.tensor),
        "sequence": _sequence(layout.context, layout.why_no_context),
        "planes": _planes(layout.spatial, layout.why_no_spatial),
        "experts": _experts(layout.experts),
    }


def describe_strategy(job: Job, strategy: Strategy, *, world: int | None = None) -> dict[str, Any]:
    """Whether a strategy is legal for the job, and which pieces each pipeline rank holds."""
    layout = layout_of(job, strategy)
    refusals = check(strategy, world=world, facts=facts_of(job, layout))
    told: dict[str, Any] = {
        "strategy": str(strategy),
        "legal": not refusals,
        "refusals": [
            {"term": str(r.term), "rule": r.rule, "reason": r.reason, "nearest": [str(s) for s in r.nearest]}
            for r in refusals
        ],
    }
    term = strategy.term(pp)
    if term is not None and not refusals:
        rows = _stages(layout, term.n * term.chunks)
        ranks = [stage_rank(stage, term.n, term.chunks, term.schedule) for stage in range(len(rows))]
        told["stages"] = [{"rank": rank, **row} for rank, row in zip(ranks, rows, strict=True)]
    return told


def _pieces(chain: Chain, model: nn.Module, samples: int) -> list[dict[str, Any]]:
    total = sum(link.cost for link in chain.links) or 1.0
    return [
        {
            "path": link.path,
            "class": type(model.get_submodule(link.path)).__name__,
            "is_block": link.is_block,
            "parameters": sum(param.numel() for param in model.get_submodule(link.path).parameters()),
            "cost_share": link.cost / total,
            "cut_before": bool(number) and not link.why_not,
            "why_no_cut": link.why_not if number else "it is the first piece",
            "crossing_bytes": _crossing_bytes(link, samples) if number and not link.why_not else None,
            "crossing": [list(wire.shape[1:] if wire.shape[:1] == (samples,) else wire.shape) for wire in link.wires]
            if number and not link.why_not
            else [],
        }
        for number, link in enumerate(chain.links)
    ]


def _crossing_bytes(link: ModelPiece, samples: int) -> int:
    return round(sum(prod(wire.shape) * wire.itemsize for wire in link.wires) / samples)


def _groups(pieces: Sequence[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Neighbours of one class with parameters of the same names and shapes, as one entry."""

    def likeness(piece: dict[str, Any]) -> tuple[Any, ...]:
        shapes = ((name, tuple(p.shape)) for name, p in model.get_submodule(piece["path"]).named_parameters())
        return piece["class"], piece["is_block"], piece["path"].rpartition(".")[0], *shapes

    groups = []
    for _, together in groupby(pieces, key=likeness):
        group = list(together)
        crossing = {piece["crossing_bytes"] for piece in group if piece["crossing_bytes"] is not None}
        groups.append(
            {
                "first": group[0]["path"],
                "last": group[-1]["path"],
                "count": len(group),
                "class": group[0]["class"],
                "is_block": group[0]["is_block"],
                "parameters": sum(piece["parameters"] for piece in group),
                "cost_share": sum(piece["cost_share"] for piece in group),
                "cuts": sum(piece["cut_before"] for piece in group),
                "crossing_bytes": sorted(crossing),
            }
        )
    return groups


def _tied(chain: Chain) -> list[dict[str, Any]]:
    return [
        {"parameter": name, "read_by": [link.path for link in chain.links if name in link.parameters]}
        for name in sorted(chain.tied)
    ]


def _stage_tables(layout: Layout) -> list[list[dict[str, Any]]]:
    wanted = STAGES_SHOWN if layout.borders is None else (len(layout.borders) + 1,)
    tables = []
    for num in wanted:
        try:
            tables.append(_stages(layout, num))
        except StageCutError:
            if layout.borders is not None:
                raise
    return tables


def _stages(layout: Layout, num: int) -> list[dict[str, Any]]:
    assert layout.chain is not None
    links = layout.chain.links
    total = sum(link.cost for link in links) or 1.0
    return [
        {
            "first": links[first].path,
            "last": links[stop - 1].path,
            "pieces": stop - first,
            "cost_share": sum(link.cost for link in links[first:stop]) / total,
        }
        for first, stop in layout.stages(num)
    ]


def _tensor(plan: TensorPlan) -> dict[str, Any]:
    words = plan.vocabulary
    return {
        "regions": [
            {"kind": r.kind, "parts": r.parts, "columns": list(r.columns), "rows": list(r.rows)} for r in plan.regions
        ],
        "vocabulary": None
        if words is None
        else {
            "words": next(iter(words.cuts.values())).size,
            "embeddings": list(words.embeddings),
            "heads": list(words.heads),
            "loss_stays_cut": words.loss_parallel,
        },
        "whole": dict(plan.whole),
        "sequence": plan.sequence_dim is not None,
        "why_no_sequence": plan.why_no_sequence if plan.sequence_dim is None else "",
        "lines": plan_lines(plan),
    }


def _sequence(plan: ContextPlan | None, why_not: str) -> dict[str, Any]:
    if plan is None:
        return {"may_be_cut": False, "why_not": why_not}
    return {
        "may_be_cut": True,
        "length": plan.length,
        "dim": plan.dim,
        "causal": plan.causal,
        "blocks": list(plan.blocks),
        "cut_along": max((len(leaves) for leaves in plan.extras.values()), default=0),
        "masks": max((len(leaves) for leaves in plan.masks.values()), default=0),
        "loss_stays_cut": plan.batch is not None,
        "loss_reads": sorted(plan.batch) if plan.batch is not None else [],
        "why_gathered": plan.why_whole,
    }


def _planes(plan: SpatialPlan | None, why_not: str) -> dict[str, Any]:
    if plan is None:
        return {"may_be_cut": False, "why_not": why_not}
    halos = [event for event in plan.events if event.kind == "move"]
    return {
        "may_be_cut": True,
        "cut_share": plan.cut_share,
        "convolutions": {module: list(size) for module, size in plan.planes},
        "exchanges": len(halos),
        "gathered": [{"module": module, "operation": operation} for module, operation in plan.gathered],
        "computed_alike": list(plan.whole),
    }


def _experts(survey: Survey) -> dict[str, Any]:
    return {
        "layers": [
            {"path": layer.path, "form": layer.form, "count": layer.count, "width": layer.width}
            for layer in survey.layers
        ],
        "passed_over": [{"path": row.path, "reason": row.reason} for row in survey.passed_over],
    }


def _declared(job: Job) -> dict[str, Any]:
    hints = job.layout
    if hints is None:
        return {}
    told = {
        "roles": dict(hints.roles),
        "stages": hints.stages and list(hints.stages),
        "balanced": hints.balanced,
        "experts": hints.experts,
        "blocks": hints.blocks and list(hints.blocks),
    }
    return {name: value for name, value in told.items() if value not in ({}, None, True)}


def span(first: str, last: str) -> str:
    """`model.layers.0 .. 31`: two paths, their common prefix printed once."""
    if first == last:
        return first
    ahead = zip(first.split("."), last.split("."), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ahead))
    return f"{first} .. {'.'.join(last.split('.')[shared:])}"
