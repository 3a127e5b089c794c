"""Stages and bubbles of pipelines in closed form, for whole columns of strategies.

The closed forms are those that `estimate/pipeline/play.py` gives when it plays a schedule with even stages; a test
holds them to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.inputs import SCHEDULES, Column, Inputs
from shoal.estimate.cost.profile import Profile

ZERO_BUBBLE, GPIPE, INTERLEAVED, PIPEDREAM = (
    SCHEDULES.index(name) for name in ("zero-bubble", "gpipe", "interleaved", "pipedream")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """How many layers lie on the stages that matter."""

    first: Column
    most: Column
    """On the fullest stage that has neither embedding nor head."""
    last: Column
    head_first: Column
    """1 where one stage is all there is."""


def stages(inputs: Inputs, profile: Profile) -> Stages:
    """Layers of the first, the fullest and the last stage (the one with the head)."""
    per = inputs.layers / (inputs.pp * inputs.chunks)
    even_most = np.ceil(per) * inputs.chunks
    even_last = np.maximum(0.0, np.where(per >= 1, np.floor(inputs.layers / inputs.pp), per))
    single = (inputs.pp == 1) * 1.0
    first, most, last = even_most, even_most, even_last
    by_cost = np.broadcast_to(
        np.asarray(profile.by_cost) > 0, np.broadcast_shapes(np.shape(per), np.shape(profile.by_cost))
    )
    if by_cost.any():
        cost_first, cost_most, cost_last = _by_cost(inputs)
        first, most, last = (
            np.where(by_cost, of_cost, even)
            for of_cost, even in ((cost_first, even_most), (cost_most, even_most), (cost_last, even_last))
        )
    whole = inputs.layers
    return Stages(
        first=np.where(single > 0, whole, first), most=np.where(single > 0, whole, most),
        last=np.where(single > 0, whole, last), head_first=single,
    )  # fmt: skip


def _by_cost(inputs: Inputs) -> tuple[Column, Column, Column]:
    """Blocks dealt in order, a stage closed once the cost so far reaches its share; the head costs vocab x hidden."""
    head_width = inputs.hidden / inputs.heads
    block = 2 * inputs.hidden * (inputs.hidden + inputs.kv_heads * head_width) + (
        2 + inputs.gated
    ) * inputs.hidden * inputs.ffn * np.maximum(1.0, inputs.active_experts)
    head = inputs.vocab * inputs.hidden / block
    share = (inputs.layers + head) / inputs.pp
    size = np.broadcast_shapes(np.shape(share), np.shape(inputs.pp), np.shape(inputs.layers))
    stage, held, first, most = (np.zeros(size) for _ in range(4))
    for layer in range(1, int(np.max(inputs.layers)) + 1):
        there = inputs.layers >= layer
        held = held + there
        first = first + (there & (stage == 0))
        most = np.where(there, np.maximum(most, held), most)
        closes = there & (layer >= (stage + 1) * share * (1 - 1e-12))
        stage, held = stage + closes, np.where(closes, 0.0, held)
    return first, most, held


def in_flight(inputs: Inputs, position: Column) -> Column:
    """Micro-batches whose activations the stage at `position` (0: first) keeps at the most, in whole stages."""
    micro, pp, chunks = inputs.micro_batches, inputs.pp, inputs.chunks
    kept = np.minimum(micro, pp - position)
    # Interleaved: 2 (pp - position - 1) + (chunks - 1) pp + 1 passes of a chunk each (Narayanan et al. 2021).
    passes = 2 * (pp - position - 1) + (chunks - 1) * pp + 1
    interleaved = np.minimum(micro, passes / chunks)
    kept = np.where(inputs.schedule == INTERLEAVED, interleaved, kept)
    # Zero-bubble keeps what 1f1b keeps on the first rank, on every rank (weight gradients come later).
    kept = np.where(inputs.schedule == ZERO_BUBBLE, np.minimum(micro, pp), kept)
    kept = np.where(inputs.schedule == GPIPE, micro, kept)
    return np.where(pp > 1, kept, 1.0)


def bubble_s(inputs: Inputs, *, others_s: Column, forward_s: Column, backward_s: Column, weight_s: Column) -> Column:
    """Idle time of the slowest stage in a step.

    `others_s` is one pass, forward and backward, through all stages but the slowest; the last three are of one stage.
    """
    micro, pp, chunks = inputs.micro_batches, inputs.pp, inputs.chunks
    usual_s = others_s / chunks
    # Zero-bubble, with the backward as input's part and weight's part: the last rank starts late by (n - 1) (F + B -
    # W); or, with few micro-batches, the last input gradient must still come back to the first rank (bubble_formula in
    # play.py).
    input_s = backward_s - weight_s
    late_s = (pp - 1) * (forward_s + input_s - weight_s) / chunks
    back_s = (pp + (micro - 1) / chunks) * (forward_s + input_s) + weight_s / chunks - micro * (forward_s + backward_s)
    split_s = np.clip(np.maximum(late_s, back_s), 0.0, (pp - 1) * (forward_s + backward_s))
    found = np.where(inputs.schedule == ZERO_BUBBLE, split_s, usual_s)
    return np.where(inputs.schedule == PIPEDREAM, 0.0, found) * (pp > 1)
