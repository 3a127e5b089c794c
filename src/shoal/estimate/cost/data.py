"""Data parallelism: what gradients, sharded parameters and the optimiser cost beyond computing.

Stages 0 and 1 of ZeRO send once a step and hide behind the last backward as far as the profile lets them. So do stages
2 and 3 under a pipeline, which keep full gradients for the step. Without one, stage 2 reduces for every micro-batch;
stage 3 also gathers every layer for each, and a layer takes the longer of computing and gathering.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.constants import Physics
from shoal.estimate.cost.inputs import Column, Inputs
from shoal.estimate.cost.kernels import streamed_s
from shoal.estimate.cost.links import Path, path
from shoal.estimate.cost.profile import Number, Profile
from shoal.estimate.cost.schedule import Stages
from shoal.estimate.cost.time import FULL, LayerTime
from shoal.estimate.cost.weights import weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """Seconds beyond computing."""

    layer_s: Column
    """For each layer and micro-batch (stage 3)."""
    head_s: Column
    step_s: Column
    """Once a step, exposed."""
    optimizer_s: Column


def data_time(inputs: Inputs, profile: Profile, physics: Physics, *, layer: LayerTime, held: Stages) -> Sharded:
    """All of data parallelism's time."""
    replicas = inputs.dp * inputs.cp
    copies = (inputs.dp / inputs.ep, inputs.dp_stride)
    sequence, sparse_part = (inputs.cp, inputs.cp_stride), (inputs.ep, inputs.ep_stride)

    def links(*others: tuple[Column, Column], one_card: Number = 0.0) -> Path:
        return path(inputs, profile, physics, ranks=copies[0], stride=copies[1], others=others, one_card=one_card)

    dense, experts = links(sequence, sparse_part), links(sequence)
    single = links(sequence, sparse_part, one_card=profile.one_card)
    held_here = weights(inputs)
    tied_once = np.where((inputs.tied > 0) & (inputs.pp == 1), 0.0, 1.0)
    tables = np.where(inputs.pp == 1, held_here.embedding + tied_once * held_here.head, held_here.embedding)
    layers_here = held.most
    dense_weights = layers_here * held_here.layer_dense + tables
    expert_weights = layers_here * held_here.layer_experts

    # Stages 0 to 2, and stage 3 under a pipeline, which keeps its parameters for the step.
    gathered_once = (inputs.zero >= 3) & (inputs.pp > 1)
    weight_bytes = np.where(inputs.wide, 4.0, 2.0)
    wire = np.maximum(weight_bytes, profile.gradient_bytes)
    sparse = inputs.experts > 0

    def both_s(bytes_each: Column, rounds: float = 1.0) -> Column:
        of_experts = np.where(sparse, experts.ring_s(bytes_each * expert_weights, rounds=rounds), 0.0)
        return dense.ring_s(bytes_each * dense_weights, rounds=rounds) + of_experts

    reduced_s = both_s(wire, rounds=2.0)
    full = (np.asarray(profile.reduce_whole) > 0) & (inputs.zero == 1)
    scattered_s = np.where(full, reduced_s, both_s(wire)) + both_s(weight_bytes)
    # Buckets beyond the first pay their latency again.
    more = np.asarray(profile.buckets) * layers_here * (dense.latency_s + dense.start_s)
    reduced_s, scattered_s = reduced_s + more, scattered_s + 2 * more
    crowd_s = np.where(
        inputs.devices >= profile.crowd_devices, profile.stall_reduce_s * inputs.dp * wire * dense_weights, 0.0
    )
    many = (inputs.zero >= 1) & ((inputs.zero < 3) | gathered_once)
    sent_s = np.where(many, scattered_s, reduced_s)
    last_backward_s = layers_here * layer.backward.total_s
    behind = np.where(many, profile.shard_hidden, profile.data_hidden) * (inputs.overlap != 0)
    shown_s = np.maximum(np.asarray(profile.data_exposed) * sent_s, sent_s - behind * last_backward_s)
    shown_s = shown_s + np.where(many, 0.0, crowd_s)
    # Without a pipeline stage 2 keeps no full gradient, so every micro-batch reduces its own; the last one's is
    # counted above.
    each_s = dense.ring_s(wire * dense_weights) + experts.ring_s(wire * expert_weights) + more
    each_s = np.maximum(np.asarray(profile.data_exposed) * each_s, each_s - behind * last_backward_s)
    shown_s = shown_s + np.where((inputs.zero == 2) & (inputs.pp == 1), (inputs.micro_batches - 1) * each_s, 0.0)
    always = (inputs.zero >= 3) & ~gathered_once

    # Stage 3: each layer for each micro-batch.
    def layer_s(bytes_each: Column) -> Column:
        of_experts = np.where(sparse, experts.ring_s(bytes_each * held_here.layer_experts), 0.0)
        return single.ring_s(bytes_each * held_here.layer_dense) + of_experts

    gather_s, scatter_s = layer_s(weight_bytes), layer_s(wire)
    forward_s = _behind(layer.forward.total_s, gather_s, profile)
    backward_s = _behind(layer.backward.total_s, (1 + gathered_again(inputs, profile)) * gather_s + scatter_s, profile)
    head_s = 0.3 * (single.ring_s(weight_bytes * held_here.head) * 2 + single.ring_s(wire * held_here.head))
    sharers = np.where(inputs.zero >= 1, replicas, 1.0)
    expert_sharers = np.where(inputs.zero >= 1, np.maximum(1.0, replicas / inputs.ep), 1.0)
    updated = dense_weights / sharers + expert_weights / expert_sharers
    return Sharded(
        layer_s=np.where(always & (replicas > 1), forward_s + backward_s, 0.0),
        head_s=np.where(always & (replicas > 1), head_s, 0.0),
        step_s=np.where(always | (replicas <= 1), 0.0, shown_s),
        optimizer_s=streamed_s(inputs, physics, physics.optimizer_bytes * updated),
    )


def gathered_again(inputs: Inputs, profile: Profile) -> Column:
    """Stage 3: the part of a recomputed layer that is gathered once more for its gradients, because the layer has more
    parameters than may stay (DeepSpeed's stage3_max_live_parameters; Rajbhandari et al. 2021 count this third load).
    """
    live, here = np.asarray(profile.live_parameters, dtype=float), weights(inputs)
    layer = here.layer_dense + here.layer_experts
    return np.where((live > 0) & (inputs.recompute == FULL), np.maximum(0.0, 1 - live / layer), 0.0)


def _behind(compute_s: Column, sent_s: Column, profile: Profile) -> Column:
    """What gathering adds to computing."""
    shorter_s = np.minimum(compute_s, sent_s)
    slowed_s = compute_s + np.asarray(profile.contention) * shorter_s
    return np.maximum(slowed_s, sent_s) + np.asarray(profile.unhidden) * shorter_s - compute_s
