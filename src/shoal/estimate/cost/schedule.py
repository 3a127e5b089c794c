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
    # Stages take the layers that are left over in order, so a rank has a part of them in its chunks.
    left_over = inputs.layers - np.floor(per) * inputs.pp * inputs.chunks
    even_most = np.floor(per) * inputs.chunks + np.ceil(left_over / inputs.pp)
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
    usual = others_s / inputs.chunks
    pp = inputs.pp
    # Stages beside the slowest are as long as `others_s` says: their passes make the bubble.
    shorter = others_s / np.maximum(1e-30, np.maximum(1.0, pp - 1) * (forward_s + backward_s))
    split = shorter * _split_bubble_s(inputs, forward_s=forward_s, input_s=backward_s - weight_s, weight_s=weight_s)
    found = np.where(inputs.schedule == ZERO_BUBBLE, np.minimum(others_s, split), usual)
    return np.where(inputs.schedule == PIPEDREAM, 0.0, found) * (pp > 1)


def _split_bubble_s(inputs: Inputs, *, forward_s: Column, input_s: Column, weight_s: Column) -> Column:
    """Zero-bubble with even stages of F, B (the input's part) and W, as playing its order gives it.

    One chunk: (n - 1) max(F + B - W, F, B); with m < n micro-batches (n - 1)(F + B) - (m - 1) W. Two chunks: the V
    order (m >= 2n - 1) has (n - 1) max(F, B) / 2, the greedy one before it (n - 1) max(B - W / 2, F / 2, B / 2), and
    below n a straight line from there to (n - 1)(F + B) for a single micro-batch.
    """
    away, micro = inputs.pp - 1, inputs.micro_batches
    longer = np.maximum(forward_s, input_s)
    one = away * np.maximum(forward_s + input_s - weight_s, longer)
    few = away * (forward_s + input_s) - (micro - 1) * weight_s
    greedy = np.maximum(input_s - weight_s / 2, longer / 2)
    alone = np.clip((inputs.pp - micro) / np.maximum(1.0, away), 0.0, 1.0)
    greedy = greedy + alone * (forward_s + input_s - greedy)
    two = away * np.where(micro >= 2 * inputs.pp - 1, longer / 2, greedy)
    return np.where(inputs.chunks > 1, two, np.where(micro < inputs.pp, few, one))


def messages(inputs: Inputs, *, inside: Column) -> Column:
    """Messages that a step waits for, as playing the schedules gives them; `inside`: the slowest has two neighbours.

    The first micro-batch's way through all ranks and back, then the slowest rank's own. Taking turns hides those of two
    passes, a split backward that of one. Interleaved, the end of a chunk is the start of the next: 2 v - 1 each way.
    """
    pp, micro, chunks = inputs.pp, inputs.micro_batches, inputs.chunks
    own = np.where(inside, 4.0, 2.0)
    hidden = np.where(inputs.schedule == GPIPE, 0.0, np.where(inputs.schedule == ZERO_BUBBLE, 1.0, 2.0))
    usual = 2 * (pp - 1) + (micro * chunks - 1) * own - 2 * inside * np.minimum(micro - 1, hidden)
    interleaved = 2 * (pp - 2) + 2 * micro * (2 * chunks - 1)
    return np.where(inputs.schedule == INTERLEAVED, interleaved, usual)
