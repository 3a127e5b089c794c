"""Bytes on the rank that needs most: parameters, gradients, optimiser, activations, logits, buffers; the maximum over stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.inputs import RECOMPUTE, Column, Inputs
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.schedule import Stages, in_flight
from shoal.estimate.cost.weights import weights

SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Columns of bytes."""

    total_bytes: Column
    split_bytes: Mapping[str, Column]
    limit_bytes: Column
    """Above this a run is expected to fail."""


def memory(inputs: Inputs, profile: Profile, *, held: Stages) -> Memory:
    """The worst stage."""
    here = weights(inputs)
    replicas = inputs.dp * inputs.cp
    single = inputs.pp == 1
    kv = inputs.kv_heads / inputs.heads
    tokens = inputs.micro_batch * inputs.sequence_length / inputs.cp
    whole = np.where(inputs.sequence > 0, inputs.tp, 1.0)
    active = np.where(inputs.experts > 0, inputs.active_experts, 1.0)
    layer_bytes = tokens * (
        7.0 * inputs.hidden / whole + 8.0 * inputs.hidden * (1 + kv) / inputs.tp
        + (2.8 * (2 + inputs.gated)) * inputs.ffn * active / inputs.tp
    )  # fmt: skip
    full_bytes = tokens * 2.0 * inputs.hidden / whole
    kept_bytes = np.where(inputs.recompute == FULL, full_bytes, layer_bytes)
    once_bytes = np.where(inputs.recompute == FULL, layer_bytes, 0.0)
    logits_bytes = tokens * inputs.vocab / inputs.tp * np.where((inputs.pp > 1) & (inputs.micro_batches > 1), 12.0, 8.0)
    worst: dict[str, Column] = {}
    best_total = None
    alone = single & (inputs.tied > 0)
    for position, layers, embeds, heads in (
        (0.0, held.first, 1.0, np.where(single & ~alone, 1.0, 0.0)),
        (np.minimum(1.0, inputs.pp - 1), held.most, 0.0, 0.0),
        (inputs.pp - 1, held.last, np.where(single & ~alone, 1.0, 0.0), 1.0),
    ):
        weights_here = layers * here.layer_dense + embeds * here.embedding + heads * here.head
        expert_weights = layers * here.layer_experts
        owned = weights_here + expert_weights
        sharded = weights_here / replicas + expert_weights / (replicas / inputs.ep)
        zero = inputs.zero
        split = {
            "parameters": 2.0 * np.where(zero >= 3, sharded, owned),
            "gradients": np.where(zero >= 1, 5.6, 6.0) * np.where(zero >= 3, sharded, owned),
            "optimizer": 12.6 * np.where(zero >= 1, sharded, owned),
            "activations": layers * kept_bytes * in_flight(inputs, position) + once_bytes,
            "logits": heads * logits_bytes + 0 * owned,
            "buffers": 0.3 * GIB + 0 * owned,
        }
        total = sum(split.values())
        if best_total is None:
            best_total, worst = total, split
        else:
            more = total > best_total
            worst = {name: np.where(more, split[name], worst[name]) for name in split}
            best_total = np.where(more, total, best_total)
    return Memory(total_bytes=best_total, split_bytes=worst, limit_bytes=0.88 * inputs.memory_bytes)
