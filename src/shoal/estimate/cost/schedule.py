"""Stages of pipelines: which layers they hold, how many micro-batches they keep, and a first guess of their bubbles.

The guess is the bubble of even stages. It decides only which of hundreds of thousands of strategies are looked at
first: whatever a plan shows has the time of `span.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.inputs import SCHEDULES, Column, Inputs
from shoal.estimate.cost.profile import Profile

NO_PIPELINE, ZERO_BUBBLE, GPIPE, INTERLEAVED, PIPEDREAM = (
    SCHEDULES.index(name) for name in ("none", "zero-bubble", "gpipe", "interleaved", "pipedream")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """How many layers lie on the stages that matter."""

    first: Column
    most: Column
    """On the fullest stage that has neither embedding nor head."""
    last: Column


def split_by_cost(inputs: Inputs, profile: Profile) -> Column:
    """What stages share where layers are split by cost, in layers: all of them and the head. 0 where split evenly."""
    if not np.any(profile.by_cost):
        return np.zeros(1)
    head_width = inputs.hidden / inputs.heads
    block = 2 * inputs.hidden * (inputs.hidden + inputs.kv_heads * head_width) + (
        2 + inputs.gated
    ) * inputs.hidden * inputs.ffn * np.maximum(1.0, inputs.active_experts)
    total = inputs.layers + inputs.vocab * inputs.hidden / block
    return np.where(np.asarray(profile.by_cost) > 0, total, 0.0)


def layers_of_stages(layers: Column, cost_layers: Column, num: int) -> Column:
    """Layers of each of `num` stages: stages x rows.

    Split evenly, the first stages take what is left over. By cost (`split_by_cost`), a stage is closed once what
    came so far reaches its share, the head counted.
    """
    stage = np.arange(num)[:, None]
    even = np.floor(layers / num) + (stage < layers % num)
    if not np.any(cost_layers):
        return np.asarray(even)
    ends = np.where(stage < num - 1, _closed(layers, cost_layers / num, stage), layers)
    return np.where(np.asarray(cost_layers) > 0, np.diff(ends, axis=0, prepend=0.0), even)


def _closed(layers: Column, share: Column, stage: Column | int) -> Column:
    """Layers on a stage and those before it, split by cost."""
    return np.minimum(layers, np.ceil((stage + 1) * share * (1 - 1e-12)))


def stages(inputs: Inputs, profile: Profile) -> Stages:
    """Layers of the first, the fullest and the last rank (the one with the head)."""
    per = inputs.layers / (inputs.pp * inputs.chunks)
    # Stages take the layers that are left over in order, so a rank has a part of them in its chunks.
    left_over = inputs.layers - np.floor(per) * inputs.pp * inputs.chunks
    even_most = np.floor(per) * inputs.chunks + np.ceil(left_over / inputs.pp)
    even_last = np.maximum(0.0, np.where(per >= 1, np.floor(inputs.layers / inputs.pp), per))
    single = (inputs.pp == 1) * 1.0
    # In the shape of a V the first rank has the last stage as well.
    turned, even = turns(inputs), np.floor(per) * inputs.chunks
    even_first = np.where(turned, even + (left_over > 0), even_most)
    even_most = np.where(turned, even + (left_over > 1) + (left_over > inputs.pp), even_most)
    even_last = np.where(turned, even_first, even_last)
    first, most, last = even_first, even_most, even_last
    cost_layers = split_by_cost(inputs, profile)
    if cost_layers.any():
        first, most, last = (
            np.where(cost_layers > 0, of_cost, even)
            for of_cost, even in zip(_by_cost(inputs, cost_layers), (even_first, even_most, even_last), strict=True)
        )
    every = inputs.layers
    return Stages(
        first=np.where(single > 0, every, first),
        most=np.where(single > 0, every, most),
        last=np.where(single > 0, every, last),
    )


def _by_cost(inputs: Inputs, cost_layers: Column) -> tuple[Column, Column, Column]:
    """Layers of the first rank, of the fullest without the head, and of the one that has the head."""
    layers, num, turned = inputs.layers, inputs.pp * inputs.chunks, turns(inputs)
    home = np.where(turned, 0, inputs.pp - 1)
    first = most = last = 0.0 * (layers + cost_layers + num)
    for rank in range(int(np.max(inputs.pp))):
        held: Column = 0.0 * first
        for chunk in range(int(np.max(inputs.chunks))):
            stage = np.where(turned & (chunk == 1), 2 * inputs.pp - 1 - rank, chunk * inputs.pp + rank)
            end = np.where(stage < num - 1, _closed(layers, cost_layers / num, stage), layers)
            held = held + (chunk < inputs.chunks) * (end - _closed(layers, cost_layers / num, stage - 1))
        first = held if rank == 0 else first
        most = np.where((rank < inputs.pp) & (rank != home), np.maximum(most, held), most)
        last = np.where(rank == home, held, last)
    return first, most, last


def turns(inputs: Inputs) -> Column:
    """Where the stages turn round at the last rank (`strategy.schedule.stage_rank`)."""
    return (inputs.schedule == ZERO_BUBBLE) & (inputs.chunks == 2) & (inputs.pp > 1)


def in_flight(inputs: Inputs, profile: Profile, position: Column) -> Column:
    """Micro-batches whose activations the stage at `position` (0: first) keeps at the most, in full stages."""
    micro, pp, chunks = inputs.micro_batches, inputs.pp, inputs.chunks
    kept = np.minimum(micro, pp - position)
    # Interleaved: 2 (pp - position - 1) + (chunks - 1) pp + 1 passes of a chunk each (Narayanan et al. 2021).
    passes = 2 * (pp - position - 1) + (chunks - 1) * pp + 1
    interleaved = np.minimum(micro, passes / chunks)
    kept = np.where(inputs.schedule == INTERLEAVED, interleaved, kept)
    # The V of zero-bubble keeps on every rank what 1f1b keeps on the first.
    kept = np.where(turns(inputs), np.minimum(micro, pp), kept)
    # Twice as many may be held: 2 (pp - position) - 1 before the first backward (Qi et al. 2024, zb-h2).
    kept = np.where(_ahead(inputs, profile), np.minimum(micro, 2 * (pp - position) - 1), kept)
    kept = np.where(inputs.schedule == GPIPE, micro, kept)
    return np.where(pp > 1, kept, 1.0)


def weights_waiting(inputs: Inputs, profile: Profile, position: Column) -> Column:
    """Micro-batches whose backward is done but for the gradients of weights, at the most: zero-bubble with one chunk
    holds pp micro-batches on every rank, or 2 pp - 1 (Qi et al. 2024, table 2), one way or the other.
    """
    most = np.where(_ahead(inputs, profile), 2 * inputs.pp - 1, inputs.pp)
    waiting = np.minimum(inputs.micro_batches, most) - in_flight(inputs, profile, position)
    split = (inputs.schedule == ZERO_BUBBLE) & (inputs.pp > 1) & (inputs.chunks == 1)
    return np.where(split, np.maximum(0.0, waiting), 0.0)


def _ahead(inputs: Inputs, profile: Profile) -> Column:
    """Where zero-bubble may hold twice as many micro-batches as 1f1b."""
    return (np.asarray(profile.split_ahead) > 1) & (inputs.schedule == ZERO_BUBBLE) & (inputs.chunks == 1)


def spared_s(inputs: Inputs, profile: Profile, weight_s: Column) -> Column:
    """What holding twice as many takes off the bubble: one stage's weight gradients for each other stage (Qi et al.
    2024: (p - 1)(F + B - 2 W) against (p - 1)(F + B - W)).
    """
    return np.where(_ahead(inputs, profile), (inputs.pp - 1) * weight_s, 0.0)


def bubble_s(inputs: Inputs, *, others_s: Column, forward_s: Column, backward_s: Column, weight_s: Column) -> Column:
    """Idle time of the slowest stage in a step.

    `others_s` is one pass, forward and backward, through all stages but the slowest; the last three are of one stage.
    """
    usual = others_s / inputs.chunks
    pp = inputs.pp
    # Stages other than the slowest are as long as `others_s` says: their passes make the bubble.
    shorter = others_s / np.maximum(1e-30, np.maximum(1.0, pp - 1) * (forward_s + backward_s))
    split = shorter * _split_bubble_s(inputs, forward_s=forward_s, input_s=backward_s - weight_s, weight_s=weight_s)
    found = np.where(inputs.schedule == ZERO_BUBBLE, np.minimum(others_s, split), usual)
    return np.where(inputs.schedule == PIPEDREAM, 0.0, found) * (pp > 1)


def _split_bubble_s(inputs: Inputs, *, forward_s: Column, input_s: Column, weight_s: Column) -> Column:
    """Zero-bubble with even stages of F, B (the input's part) and W, as simulating its order gives it.

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
    """Messages that a step waits for, as simulating the schedules gives them; `inside`: the slowest has two neighbours.

    The first micro-batch's way through all ranks and back, then the slowest rank's own. Taking turns hides those of two
    passes, a split backward that of one. Interleaved, the end of a chunk is the start of the next: 2 v - 1 each way.
    """
    pp, micro, chunks = inputs.pp, inputs.micro_batches, inputs.chunks
    own = np.where(inside, 4.0, 2.0)
    hidden = np.where(inputs.schedule == GPIPE, 0.0, np.where(inputs.schedule == ZERO_BUBBLE, 1.0, 2.0))
    usual = 2 * (pp - 1) + (micro * chunks - 1) * own - 2 * inside * np.minimum(micro - 1, hidden)
    interleaved = 2 * (pp - 2) + 2 * micro * (2 * chunks - 1)
    return np.where(inputs.schedule == INTERLEAVED, interleaved, usual)
