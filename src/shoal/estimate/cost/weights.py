"""What one rank holds: its parameters before they are sharded among replicas, and inputs that it keeps gathered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.inputs import Column, Inputs
from shoal.estimate.cost.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Parameters on one rank, before sharding among replicas."""

    layer_dense: Column
    layer_experts: Column
    embedding: Column
    head: Column


def weights(inputs: Inputs) -> Weights:
    """Of one layer, the embedding and the head, after tp and ep."""
    kv_width = inputs.kv_heads * inputs.hidden / inputs.heads
    sparse = inputs.experts > 0
    ffn = (2 + inputs.gated) * inputs.hidden * inputs.ffn / inputs.tp
    dense = 2 * inputs.hidden * (inputs.hidden + kv_width) / inputs.tp + 2 * inputs.hidden
    table = inputs.vocab * inputs.hidden / inputs.tp
    return Weights(
        layer_dense=dense + np.where(sparse, inputs.experts * inputs.hidden, ffn),
        layer_experts=np.where(sparse, ffn * inputs.experts / inputs.ep, 0.0),
        embedding=table,
        head=table,
    )


def kept_gathers(inputs: Inputs, profile: Profile) -> Column:
    """Sequence parallelism gathers the inputs of products; who keeps them saves two gathers a layer and pays in memory.
    The part of a layer's gathered inputs that is kept for backward: by a profile that keeps them all of it without a
    pipeline, some in deep ones; none in a crowd, where its tensor parallelism stalls.
    """
    crowd = inputs.devices >= profile.crowd_devices
    alone = (inputs.pp == 1) & ~(crowd & (inputs.tp >= 8) & (inputs.tp <= 16))
    deep = (inputs.pp >= 4) & (inputs.tp <= 16) & ~crowd
    part = np.where(alone, 1.0, np.where(deep, profile.regathered_deep, 0.0))
    keeps = np.asarray(profile.regathered_bytes) > 0
    return np.where((inputs.sequence > 0) & (inputs.tp > 1) & keeps, part, 0.0)
