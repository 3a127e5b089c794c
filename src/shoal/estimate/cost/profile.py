"""`Profile`: the constants of a framework and of the cluster it ran on, as data, separate from the physics.

How long the host takes for a layer, what overlaps, which precision travels, what is recomputed under the name
"selective". A profile may be learned from some tens of one's own steps (`learn.py`). Fields hold a number, or a column
of numbers once the profiles of many rows are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Number = Any
"""A float, or a column of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A framework profile; the defaults are those of a good framework."""

    name: str = "good"
    # The host.
    host_layer_s: Number = 0.8e-3
    """Launching one layer's forward."""
    host_tensor_s: Number = 0.008e-3
    """More of it for ranks of tp, which wait for each other's hosts: times tp to the power of the physics' `skew`."""
    host_backward: Number = 1.5
    """Backward, against forward."""
    host_pass_s: Number = 0.9e-3
    """Once for each micro-batch and stage."""
    host_expert_s: Number = 0.8e-3
    """More of it for routing and permuting, where there are experts."""
    # Kernels.
    flash: Number = 1.0
    """1: fused attention; 0: the score matrix is written to memory."""
    flash_hopper: Number = 0.58
    """Speed of the fused kernel on devices since Hopper, against its part of the peak on A100 (0.58: FlashAttention 2).
    """
    elementwise: Number = 1.0
    """Bytes of memory-bound operations: below 1 where a compiler fuses them, above 1 where nothing does."""
    # Recomputation.
    selective_gemm: Number = 0.0
    """What "selective" repeats of the matrix products, of attention, and of the rest."""
    selective_attention: Number = 1.0
    selective_rest: Number = 0.0
    # Messages.
    tensor_hidden: Number = 0.0
    """Part of tp's messages that hides behind products."""
    gradient_bytes: Number = 2.0
    """Bytes a parameter on the wire."""
    data_hidden: Number = 0.5
    """Part of the last backward behind which gradients may hide."""
    data_exposed: Number = 0.1
    """Part of data parallelism's messages that never hides."""
    shard_hidden: Number = 0.5
    """As data_hidden, for zero 1 and 2."""
    reduce_whole: Number = 0.0
    """1: zero 1 sums all gradients on every rank, though each needs its part only."""
    buckets: Number = 0.1
    """Collectives of data parallelism for each layer: each pays its latency."""
    contention: Number = 0.27
    """zero 3: how much gathering slows the computing that it hides behind, for each second of both. Computing does not
    slow the links: a layer that waits for them takes as long as they do.
    """
    unhidden: Number = 0.0
    """zero 3: part of the shorter of computing and gathering that does not overlap at all."""
    live_parameters: Number = 0.0
    """zero 3: parameters that may stay gathered. A larger layer that is recomputed is gathered for that, and the rest
    of it again for its gradients. 0: a layer stays until its backward is over.
    """
    one_card: Number = 0.0
    """zero 3: 1 if a node's messages go through one network card."""
    hop_ratio: Number = 1.0
    """Latency between nodes, against the cluster's."""
    hop_power: Number = 0.0
    """It grows as this power of the ranks that a node has in the ring (0: cards work side by side)."""
    expert_hidden: Number = 0.0
    """Part of the experts' exchanges that hides."""
    expert_folded: Number = 0.0
    """1: experts lie on neighbouring ranks whatever tp is, none of them cut; a token goes once to each node that has
    experts for it, and is copied there.
    """
    # Pipelines.
    by_cost: Number = 0.0
    """1: layers are assigned to stages by estimated cost, the head counted; 0: evenly."""
    split_ahead: Number = 1.0
    """zero-bubble with one chunk: micro-batches a rank may hold, for each stage: 1 (zb-h1, zb-1p) or 2 (zb-h2, zb-2p).
    """
    message_ratio: Number = 1.0
    """Part of a message between stages that is felt: below 1 where it overlaps."""
    # Memory. Bytes a parameter: weights in 16 bits, gradients held, master copy and moments.
    parameter_bytes: Number = 2.0
    gradient_held_bytes: Number = 4.0
    state_bytes: Number = 12.0
    step_bytes: Number = 0.0
    """For each parameter that a rank updates: a copy of its gradient in 32 bits, after the activations are freed."""
    norm_bytes: Number = 8.0
    """Bytes kept for each number of a layer's width: inputs of two norms and what they give to products."""
    attention_bytes: Number = 2.0
    """For each number of queries, keys, values and output."""
    ffn_bytes: Number = 2.0
    """For each number into and out of the activation function."""
    gate_kept: Number = 2.0
    """Further tensors that a gate keeps: itself, and what it gives to the product (1 where both are one kernel)."""
    regathered_bytes: Number = 0.0
    """Sequence parallelism: gathered inputs that are kept, for each number of a layer's width."""
    regathered_deep: Number = 0.0
    """Part of them that pipelines of four stages and more keep."""
    selective_kept: Number = 1.0
    """Part of these that "selective" keeps (scores are never kept then)."""
    gathered_layers: Number = 1.5
    """zero 3: weights of the layer in use and of the next, gradients of one, in 16 bits. Known: how FSDP prefetches."""
    logit_bytes: Number = 8.0
    """For each logit."""
    buffer_bytes: Number = 1e9
    """Workspaces of libraries and collectives."""
    usable: Number = 0.92
    """Part of the device's memory that a program can fill; fragments take the rest."""
    overfull: Number = 1.0
    """How many times as long a step takes that needs more than the device has and runs all the same: the allocator
    gives blocks back and asks for them anew in every pass.
    """
    # Stalls of one framework's host path.
    stall_tensor_s: Number = 0.0
    """Forward and backward of a layer, times tp to a power: over several nodes, with a pipeline or in a crowd."""
    stall_power: Number = 1.0
    stall_message_s: Number = 0.0
    """Each message between stages, where there is a crowd."""
    stall_reduce_s: Number = 0.0
    """Each byte of an all-reduce of gradients for each replica, where there is a crowd."""
    crowd_devices: Number = 1e9
    """Number of devices from which on there is a crowd: host stalls begin."""
    crowd_replicas: Number = 1e9
    """Number of sharded replicas from which on half of `crowd_devices` is a crowd."""
    crowd_tensor: Number = 1e9
    """Ranks of tp from which on messages between stages stall, crowd or not."""


def gathered(profiles: Sequence[Profile], index: np.ndarray) -> Profile:
    """Profiles of many rows as one whose fields are columns."""
    return Profile(
        name="rows",
        **{
            field.name: np.array([getattr(profile, field.name) for profile in profiles])[index]
            for field in fields(Profile)
            if field.name != "name"
        },
    )
