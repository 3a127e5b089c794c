"""Bytes on the rank that needs most: parameters, gradients, optimiser, activations, logits, buffers.

Activations are counted operator by operator, as autograd keeps them: inputs of norms and products, queries, keys,
values, and what goes into and out of the activation function. Three stages are looked at (the first keeps most
micro-batches, the second may hold more layers, the last has the logits), and the fullest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.inputs import RECOMPUTE, Column, Inputs
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.schedule import Stages, in_flight, turns, weights_waiting
from shoal.estimate.cost.weights import Weights, kept_gathers, weights

SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Columns of bytes."""

    total_bytes: Column
    split_bytes: Mapping[str, Column]
    limit_bytes: Column
    """Above this a run is expected to fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of one layer for one micro-batch: kept until its backward, kept between its backward and the gradients of
    its weights where these come later, and needed while it runs.
    """

    kept: Column
    waiting: Column
    working: Column


def memory(inputs: Inputs, profile: Profile, *, held: Stages) -> Memory:
    """The worst stage, split by cause."""
    here, layer = weights(inputs), activations(inputs, profile)
    single = inputs.pp == 1
    untied = np.where(single & (inputs.tied == 0), 1.0, 0.0)
    # In the shape of a V one rank has both ends.
    both = np.where((single | turns(inputs)) & (inputs.tied == 0), 1.0, 0.0)
    worst: dict[str, Column] = {}
    total: Column | None = None
    for position, layers, embeds, heads in (
        (0.0, held.first, 1.0, untied),
        (np.minimum(1.0, inputs.pp - 1), held.most, 0.0, 0.0),
        (inputs.pp - 1, held.last, both, 1.0),
    ):
        split = _states(inputs, profile, here, layers=layers, tables=embeds + heads)
        passes_kept = in_flight(inputs, profile, np.asarray(position))
        later = weights_waiting(inputs, profile, np.asarray(position))
        split["activations"] = layers * (layer.kept * passes_kept + layer.waiting * later) + layer.working
        split["logits"] = heads * _logits(inputs, profile, later)
        # Gradients are widened when the activations are freed.
        wider = profile.step_bytes * split["optimizer"] / profile.state_bytes
        split["optimizer"] = split["optimizer"] + np.maximum(0.0, wider - split["activations"] - split["logits"])
        split["buffers"] = np.asarray(profile.buffer_bytes) + _gathered(inputs, profile, here)
        sum_here = sum(split.values(), np.zeros(1))
        split = {name: value + 0 * sum_here for name, value in split.items()}
        if total is None:
            total, worst = sum_here, split
        else:
            more = sum_here > total
            worst = {name: np.where(more, split[name], worst[name]) for name in split}
            total = np.maximum(total, sum_here)
    assert total is not None
    return Memory(total_bytes=total, split_bytes=worst, limit_bytes=profile.usable * inputs.memory_bytes)


def activations(inputs: Inputs, profile: Profile) -> Activations:
    """What one layer keeps."""
    tokens = inputs.micro_batch * inputs.sequence_length / inputs.cp
    hidden, tp = inputs.hidden, inputs.tp
    sequence_ranks = np.where(inputs.sequence > 0, tp, 1.0)
    wide = np.where(inputs.wide, 2.0, 1.0)
    active = np.where(inputs.experts > 0, inputs.active_experts, 1.0)
    between = profile.norm_bytes * hidden / sequence_ranks
    # Queries, keys, values and the output of attention; in and out of the activation function (and its gate).
    attention = profile.attention_bytes * 2 * hidden * (1 + inputs.kv_heads / inputs.heads) / tp
    ffn = profile.ffn_bytes * (2 + profile.gate_kept * inputs.gated) * inputs.ffn * active / tp
    routed = np.where(inputs.experts > 0, 4 * active * hidden / sequence_ranks, 0.0)
    regathered = profile.regathered_bytes * hidden * kept_gathers(inputs, profile)
    # Without fusion: softmax, its dropout (16 bits each) and the mask (Korthikanti et al. 2022).
    scores = np.where(np.asarray(profile.flash) > 0, 0.0, 5 * inputs.heads * inputs.sequence_length / tp)
    all_bytes = tokens * wide * (between + attention + ffn + routed + regathered)
    scores_bytes = tokens * wide * scores
    border_bytes = tokens * wide * 2 * hidden / sequence_ranks
    full, some = inputs.recompute == FULL, inputs.recompute == SELECTIVE
    kept = np.where(full, border_bytes, np.where(some, profile.selective_kept * all_bytes, all_bytes + scores_bytes))
    working = np.where(full | some, all_bytes + scores_bytes - np.where(full, 0.0, kept), 0.0)
    # Inputs of the four products and gradients of their outputs: 32 s b h in a plain layer (Qi et al. 2024, table 1).
    inputs_of = 2 * hidden / sequence_ranks + (hidden + inputs.ffn * active) / tp
    kv_width = inputs.kv_heads * hidden / inputs.heads
    outputs_of = 2 * hidden / sequence_ranks + (hidden + 2 * kv_width + inputs.ffn * active * (1 + inputs.gated)) / tp
    # Sequence parallelism gathers the input of the product in work, and the gradient of its output.
    working = working + np.where((inputs.sequence > 0) & (tp > 1), tokens * wide * 4 * hidden, 0.0)
    return Activations(
        kept=kept, waiting=tokens * wide * 2 * (inputs_of + outputs_of), working=np.maximum(0.0, working)
    )


def _states(
    inputs: Inputs, profile: Profile, here: Weights, *, layers: Column, tables: Column | float
) -> dict[str, Column]:
    """Parameters, gradients and optimiser of one stage, after sharding."""
    replicas = inputs.dp * inputs.cp
    dense = layers * here.layer_dense + tables * here.embedding
    experts = layers * here.layer_experts
    full = dense + experts
    shared = dense / replicas + experts / np.maximum(1.0, replicas / inputs.ep)
    zero = inputs.zero
    # Under a pipeline gradients are reduced once a step, so they are full until then; stage 3 keeps full parameters
    # as well, and its shards.
    once = (inputs.pp > 1) & (replicas > 1)
    resident = (zero >= 3) & once
    return {
        "parameters": np.where((zero >= 3) & ~resident, 0.0, profile.parameter_bytes * full),
        "gradients": profile.gradient_held_bytes * np.where((zero >= 2) & ~((zero == 2) & once), shared, full)
        + np.where(resident, profile.gradient_held_bytes * full, 0.0),
        "optimizer": profile.state_bytes * np.where(zero >= 1, shared, full),
    }


def _gathered(inputs: Inputs, profile: Profile, here: Weights) -> Column:
    """Layers that stage 3 has gathered, and the largest table while it is in use."""
    layer = here.layer_dense + here.layer_experts
    always = (inputs.zero >= 3) & (inputs.pp == 1) & (inputs.dp * inputs.cp > 1)
    staying = 2 * np.minimum(profile.live_parameters, inputs.layers * layer + here.embedding)
    in_use = np.maximum(staying, profile.gathered_layers * 4 * layer)
    return np.where(always, in_use + 4 * here.embedding, 0.0)


def _logits(inputs: Inputs, profile: Profile, later: Column) -> Column:
    """In a pipeline the next micro-batch's come while the last one's are still there. Where weight gradients come
    `later`, the head waits with its input and the gradients of its logits.
    """
    tokens = inputs.micro_batch * inputs.sequence_length / inputs.cp
    again = np.where((inputs.pp > 1) & (inputs.micro_batches > 1), 1.5, 1.0)
    waiting = later * tokens * np.where(inputs.wide, 4.0, 2.0) * (inputs.vocab / inputs.tp + inputs.hidden)
    return profile.logit_bytes * again * tokens * inputs.vocab / inputs.tp + waiting
