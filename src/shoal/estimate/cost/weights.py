"""Parameters on one rank, before they are sharded among replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.inputs import Column, Inputs


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
        embedding=table, head=table,
    )  # fmt: skip
