"""The rules of legality as masks over columns. `strategy/legality/` is the source; a test compares the two."""

from __future__ import annotations

import numpy as np

from shoal.estimate.cost.inputs import RECOMPUTE, SCHEDULES
from shoal.planning.candidates import COMPRESSORS, Candidates, Column
from shoal.shapes.shape import Transformer
from shoal.strategy import ModelFacts

INTERLEAVED, ZERO_BUBBLE, PIPEDREAM = (SCHEDULES.index(name) for name in ("interleaved", "zero-bubble", "pipedream"))
KEEP_ALL = RECOMPUTE.index("none")
BETWEEN_GROUPS = np.array([term.between_groups for term in COMPRESSORS])
"""Compressors that need a level of dp inside theirs."""


def facts_of(shape: Transformer, *, global_batch: int) -> ModelFacts:
    """What legality needs to know of a shape. Gradients are taken to be clipped, as everybody does who trains one."""
    return ModelFacts(
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        hidden=shape.hidden,
        vocab=shape.vocab,
        sequence=shape.sequence,
        experts=shape.experts,
        global_batch=global_batch,
        tied=shape.tied,
        clips=True,
        elementwise_optimizer=True,
    )


def legal(rows: Candidates, *, world: int, facts: ModelFacts) -> Column:
    """Which rows `is_legal` would pass."""
    passed = (rows.world == world) & _axes(rows, facts) & _batch(rows, facts) & _pipeline(rows, facts)
    return passed & ~(BETWEEN_GROUPS[rows.compress] & (rows.outer > 1) & (rows.dp == 1))


def _axes(rows: Candidates, facts: ModelFacts) -> Column:
    tensor, turned = rows.tp > 1, (rows.cp > 1) & (rows.ulysses > 0)
    passed = np.ones(len(rows), dtype=bool)
    if facts.tensor_parts is not None:
        passed &= ~tensor | bool(facts.tensor_parts)
        parts: list[int] = [row[2] for row in facts.tensor_parts]
    else:
        parts = [number for number in (facts.heads, facts.kv_heads, facts.hidden) if number is not None]
        parts += list(facts.channels or ())
    for number in set(parts):
        passed &= number % rows.tp == 0
    cut = tensor & (rows.sequence > 0)
    if facts.sequence_why:
        passed &= ~cut
    if facts.sequence_under_cp_why:
        passed &= ~cut | (rows.cp == 1)
    if facts.sequence is not None:
        passed &= ~cut | (facts.sequence % (rows.tp * rows.cp) == 0)
        passed &= (rows.cp == 1) | (facts.sequence % (np.where(turned, 1, 2) * rows.cp) == 0)
    for heads in (facts.heads, facts.kv_heads):
        passed &= ~turned | (heads is None) | ((heads or 0) % (rows.cp * rows.tp) == 0)
    if facts.context_why or (facts.image is not None and facts.sequence is None and facts.heads is None):
        passed &= rows.cp == 1
    if facts.context_in_stages_why:
        passed &= (rows.cp == 1) | (rows.pp == 1)
    if facts.experts == 0:
        passed &= rows.ep == 1
    elif facts.experts:
        passed &= facts.experts % rows.ep == 0
    if facts.coupled_optimizer:
        passed &= ((rows.zero == 0) | (rows.dp == 1)) & ~tensor & (rows.ep == 1) & (rows.pp == 1)
    return passed


def _batch(rows: Candidates, facts: ModelFacts) -> Column:
    if facts.global_batch is None:
        return np.ones(len(rows), dtype=bool)
    return facts.global_batch % (rows.replicas * rows.micro) == 0


def _pipeline(rows: Candidates, facts: ModelFacts) -> Column:
    interleaved, split = rows.schedule == INTERLEAVED, rows.schedule == ZERO_BUBBLE
    passed = ~interleaved | ((rows.chunks >= 2) & (rows.micro % rows.pp == 0))
    passed &= (rows.chunks == 1) | interleaved | split
    passed &= ~split | (rows.recompute == KEEP_ALL)
    stashing = rows.schedule == PIPEDREAM
    passed &= ~stashing | (rows.zero == 0) | (rows.dp == 1)
    if facts.clips or facts.tied:
        passed &= ~stashing
    if facts.layers is not None:
        passed &= rows.pp * rows.chunks <= facts.layers
    return passed | (rows.pp == 1)
