"""The `Transformer` shape of a job's model, read from its modules: the input of the cost model.

A model that is not a transformer (no heads, no sequence, no identical blocks) is refused.
"""

from __future__ import annotations

from torch import nn

from shoal.job import Job
from shoal.job.facts import build_without_memory
from shoal.layout.blocks import blocks
from shoal.layout.layout import facts_of, layout_of
from shoal.shapes.shape import Transformer
from shoal.strategy import ModelFacts


class NoTransformer(ValueError):
    """A model that does not have the shape of a transformer."""


def shape_of(job: Job) -> tuple[Transformer, ModelFacts]:
    """(shape, facts of legality) of a job's model."""
    model = build_without_memory(job)
    facts = facts_of(job, layout_of(job))
    needed = {"heads": facts.heads, "hidden": facts.hidden, "vocab": facts.vocab, "sequence": facts.sequence}
    missing = [name for name, value in needed.items() if not value]
    repeated = [module for _, module in blocks(model)]
    if missing or len(repeated) < 1:
        what = ", ".join(missing) if missing else "chain of identical blocks"
        raise NoTransformer(
            f"{job.name}: {type(model).__name__} has no {what}, so it cannot be estimated as a transformer; "
            "plan a preset shape, declare what is missing in the job's facts, or train it with a strategy of your own"
        )
    assert facts.heads is not None
    assert facts.hidden is not None
    assert facts.vocab is not None
    assert facts.sequence is not None
    widths = _widths(repeated[0], hidden=facts.hidden)
    gated = len(widths) >= 2
    shape = Transformer(
        name=job.name,
        layers=len(repeated),
        hidden=facts.hidden,
        heads=facts.heads,
        kv_heads=facts.kv_heads or 0,
        ffn=max(widths, default=0),
        gated=gated,
        vocab=facts.vocab,
        tied=bool(facts.tied),
        experts=facts.experts or 0,
        sequence=facts.sequence,
    )
    return shape, facts


def _widths(block: nn.Module, *, hidden: int) -> list[int]:
    """Widths of the linear layers that lead from the residual stream into a feed-forward part: one, or two if gated.

    A layer counts if another layer of the block leads from the same width back to the stream. This excludes attention's
    projections: no layer reads the joint width of queries, keys and values.
    """
    linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
    out = {module.in_features for module in linear if module.out_features == hidden and module.in_features != hidden}
    return [module.out_features for module in linear if module.in_features == hidden and module.out_features in out]
