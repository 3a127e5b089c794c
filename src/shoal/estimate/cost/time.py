"""Seconds of one layer and of the head for one micro-batch on one rank, split by cause.

A layer takes the longer of what the device needs and what the host needs to launch it: a maximum, not a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.estimate.cost.constants import Physics
from shoal.estimate.cost.inputs import RECOMPUTE, Column, Inputs
from shoal.estimate.cost.kernels import attention_s, linear_s, streamed_s
from shoal.estimate.cost.links import path
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.weights import kept_gathers

SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
PASSES = ("compute", "host", "tensor", "context", "expert")
"""The causes into which a layer's time is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPass:
    """One direction through one layer (or the head)."""

    compute_s: Column
    host_s: Column
    """What the host adds beyond the device's time."""
    tensor_s: Column
    context_s: Column
    expert_s: Column

    @property
    def total_s(self) -> Column:
        """All of it."""
        return self.compute_s + self.host_s + self.tensor_s + self.context_s + self.expert_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """A layer's forward and backward (recomputation included), and the part that weight gradients take."""

    forward: LayerPass
    backward: LayerPass
    weight_s: Column


def layer_time(inputs: Inputs, profile: Profile, physics: Physics) -> LayerTime:
    """One layer, one micro-batch."""
    tokens = inputs.micro_batch * inputs.sequence_length / inputs.cp
    hidden, tp = inputs.hidden, inputs.tp
    kv_width = inputs.kv_heads * hidden / inputs.heads
    attention = attention_s(inputs, profile, physics)
    sparse = inputs.experts > 0
    active = np.where(sparse, inputs.active_experts, 1.0)
    products = [
        linear_s(inputs, physics, each.rows, each.inner, each.columns, count=each.count)
        for each in layer_products(inputs, imbalance=physics.imbalance)
    ]
    gemm_forward, gemm_input, gemm_weight = (
        np.sum(np.broadcast_arrays(*each), axis=0) for each in zip(*products, strict=True)
    )
    element_bytes = np.where(inputs.wide, 4.0, 2.0)
    sequence_ranks = np.where(inputs.sequence > 0, tp, 1.0)
    passed = (
        10 * hidden / sequence_ranks
        + (inputs.ffn * active * (2 + 2 * inputs.gated) + 2 * (hidden + 2 * kv_width) + 2 * hidden) / tp
        + np.where(sparse, 6 * active * hidden / sequence_ranks, 0.0)
    )
    rest_bytes = physics.elementwise * profile.elementwise * element_bytes * tokens * passed
    rest_forward, rest_backward = streamed_s(inputs, physics, rest_bytes), streamed_s(inputs, physics, 2 * rest_bytes)
    compute_forward = gemm_forward + attention[0] + rest_forward
    compute_backward = gemm_input + gemm_weight + attention[1] + rest_backward

    tensor = _tensor_s(inputs, profile, physics, tokens * hidden * element_bytes)
    context = _context_s(
        inputs,
        profile,
        physics,
        attention,
        queries_bytes=tokens * hidden / tp * element_bytes,
        keys_and_values_bytes=tokens * 2 * kv_width / tp * element_bytes,
    )
    expert = _expert_s(inputs, profile, physics, tokens * active * hidden * element_bytes)

    again = inputs.recompute == FULL
    some = inputs.recompute == SELECTIVE
    repeated = np.where(again, compute_forward, 0.0) + np.where(
        some,
        profile.selective_gemm * gemm_forward
        + profile.selective_attention * attention[0]
        + profile.selective_rest * rest_forward,
        0.0,
    )
    waits_s, stall_s = _host_waits(inputs, profile, physics)
    host_s = profile.host_layer_s + waits_s + profile.host_expert_s * sparse
    forward = _pass(
        physics,
        compute_s=compute_forward,
        host_s=host_s + 0.4 * stall_s,
        tensor_s=tensor[0],
        context_s=context[0],
        expert_s=expert[0],
    )
    backward = _pass(
        physics,
        compute_s=compute_backward + repeated,
        host_s=host_s * (profile.host_backward + np.where(again, 1.0, 0.0)) + 0.6 * stall_s,
        tensor_s=tensor[1] + np.where(again, tensor[0], 0.0),
        context_s=context[1] + np.where(again, context[0], 0.0),
        expert_s=expert[1] + np.where(again, expert[0], 0.0),
    )
    return LayerTime(forward=forward, backward=backward, weight_s=gemm_weight)


@dataclass(frozen=True, slots=True)
class Products:
    """`count` products of (rows x inner) by (inner x columns)."""

    rows: Column
    inner: Column
    columns: Column
    count: Column | float = 1.0


def layer_products(inputs: Inputs, *, imbalance: float = 1.0) -> list[Products]:
    """The matrices of one layer on one rank, for one micro-batch: query, key and value in one, the output's, and the
    two of the feed-forward part. `imbalance`: how many more tokens than its share the fullest expert gets."""
    tokens = inputs.micro_batch * inputs.sequence_length / inputs.cp
    hidden, tp = inputs.hidden, inputs.tp
    head_width = hidden / inputs.heads
    kv_local = np.maximum(inputs.kv_heads * head_width / tp, head_width)
    sparse = inputs.experts > 0
    active = np.where(sparse, inputs.active_experts, 1.0)
    experts = np.where(sparse, np.maximum(1.0, inputs.experts / inputs.ep), 1.0)
    rows = tokens * active / experts * np.where(sparse, imbalance, 1.0)
    return [
        Products(tokens, hidden, hidden / tp + 2 * kv_local),
        Products(tokens, hidden / tp, hidden),
        Products(rows, hidden, inputs.ffn * (1 + inputs.gated) / tp, experts),
        Products(rows, inputs.ffn / tp, hidden, experts),
    ]


def head_time(inputs: Inputs, profile: Profile, physics: Physics) -> tuple[LayerPass, LayerPass]:
    """(forward, backward) of the head and the loss."""
    tokens = inputs.micro_batch * inputs.sequence_length / inputs.cp
    # The head stays in 16 bits whatever the layers' precision.
    forward, back_input, back_weight = linear_s(
        inputs, physics, tokens, inputs.hidden, inputs.vocab / inputs.tp, narrow=False
    )
    loss_s = streamed_s(inputs, physics, physics.loss_bytes * tokens * inputs.vocab / inputs.tp)
    tensor = path(inputs, profile, physics, ranks=inputs.tp, stride=inputs.tp_stride)
    # The input's gradient and the embedding's output, and three small sums inside the loss (maximum, sum, target).
    gather_s = 2 * tensor.ring_s(tokens * inputs.hidden * np.where(inputs.wide, 4.0, 2.0), rounds=2.0)
    small_s = 3 * tensor.ring_s(4 * tokens, rounds=2.0)
    none = 0.0 * tokens
    # About half as many collectives as a layer has, and as much waiting.
    waits_s, stall_s = _host_waits(inputs, profile, physics)
    host_s = profile.host_pass_s / 2 + 0.5 * waits_s + 0.25 * stall_s
    return (
        _pass(
            physics,
            compute_s=forward + loss_s / 2,
            host_s=host_s,
            tensor_s=small_s,
            context_s=none,
            expert_s=none,
        ),
        _pass(
            physics,
            compute_s=back_input + back_weight + loss_s / 2,
            host_s=host_s,
            tensor_s=gather_s,
            context_s=none,
            expert_s=none,
        ),
    )


def _host_waits(inputs: Inputs, profile: Profile, physics: Physics) -> tuple[Column, Column]:
    """(forward of a layer: ranks of tp wait for the slowest host; forward and backward: a framework's own stall).

    Hosts slow each other down where their ranks share a node; ranks of other nodes add messages, not waiting of this
    kind.
    """
    several = inputs.tp > 1
    sharing = np.minimum(inputs.tp, inputs.level_ranks[0])
    crowd = (inputs.devices >= profile.crowd_devices) & (inputs.tp >= 8) & (inputs.tp <= 16)
    stalls = several & (inputs.devices > inputs.level_ranks[0]) & ((inputs.pp > 1) | crowd)
    return (
        profile.host_tensor_s * np.where(several, sharing**physics.skew, 0.0),
        profile.stall_tensor_s * np.where(stalls, inputs.tp**profile.stall_power, 0.0),
    )


def _pass(
    physics: Physics, *, compute_s: Column, host_s: Column, tensor_s: Column, context_s: Column, expert_s: Column
) -> LayerPass:
    """The host's part is what it adds to the device's time."""
    device_s = compute_s + tensor_s + context_s + expert_s
    longest_s = np.maximum(device_s, host_s)
    both_s = longest_s * (1 + (np.minimum(device_s, host_s) / longest_s) ** physics.blend) ** (1 / physics.blend)
    none = 0 * device_s
    return LayerPass(
        compute_s=compute_s + none,
        host_s=both_s - device_s,
        tensor_s=tensor_s + none,
        context_s=context_s + none,
        expert_s=expert_s + none,
    )


def _tensor_s(inputs: Inputs, profile: Profile, physics: Physics, payload: Column) -> tuple[Column, Column]:
    """Two all-reduces each way; with sequence=True two pairs of halves, and two more gathers backward (Korthikanti
    2022).
    """
    links = path(inputs, profile, physics, ranks=inputs.tp, stride=inputs.tp_stride)
    # Overlap with products is made of direct copies between devices of one node, and of halves of all-reduces.
    direct = (inputs.tp * inputs.tp_stride <= inputs.level_ranks[0]) & (inputs.sequence > 0)
    shown = 1 - np.where(direct, profile.tensor_hidden, 0.0)
    reduce_s = 2 * links.ring_s(payload, rounds=2.0)
    half = links.ring_s(payload)
    cut = inputs.sequence > 0
    return np.where(cut, 4 * half, reduce_s) * shown, np.where(
        cut, (6 - 2 * kept_gathers(inputs, profile)) * half, reduce_s
    ) * shown


def _context_s(
    inputs: Inputs,
    profile: Profile,
    physics: Physics,
    attention: tuple[Column, Column],
    *,
    queries_bytes: Column,
    keys_and_values_bytes: Column,
) -> tuple[Column, Column]:
    """A ring: keys and values go round behind attention, backward with their gradients; what attention does not cover
    is felt, and a tenth always. Ulysses: an all-to-all before attention and one after it, each way, hidden by nothing.
    """
    links = path(inputs, profile, physics, ranks=inputs.cp, stride=inputs.cp_stride)
    round_s = links.ring_s(keys_and_values_bytes * inputs.cp)
    turned_s = links.exchange_s(queries_bytes + keys_and_values_bytes) + links.exchange_s(queries_bytes)
    forward_s, backward_s = (
        np.where(inputs.ulysses > 0, turned_s, np.maximum(0.1 * rounds * round_s, rounds * round_s - computed_s))
        for rounds, computed_s in zip((1, 2), attention, strict=True)
    )
    return forward_s * (inputs.cp > 1), backward_s * (inputs.cp > 1)


def _expert_s(inputs: Inputs, profile: Profile, physics: Physics, payload: Column) -> tuple[Column, Column]:
    """Tokens go to their experts and come back. With tp each rank sends its part of them, and gathers it among tp
    unless experts are folded over tp.
    """
    if not np.any(inputs.experts > 0):
        return 0.0 * payload, 0.0 * payload
    folded = np.asarray(profile.expert_folded) > 0
    links = path(inputs, profile, physics, ranks=inputs.ep, stride=np.where(folded, 1.0, inputs.ep_stride))
    copies = np.where(folded, np.maximum(1.0, inputs.active_experts), 0.0)
    exchange_s = 2 * links.exchange_s(payload / inputs.tp, copies=copies) * (1 - np.asarray(profile.expert_hidden))
    within = path(inputs, profile, physics, ranks=inputs.tp, stride=inputs.tp_stride)
    # The dense part's two collectives around the feed-forward part carry tokens once; experts carry each of them
    # `active_experts` times.
    more_s = 2 * within.ring_s(payload * np.maximum(0.0, 1 - 1 / np.maximum(1.0, inputs.active_experts)))
    more_s = np.where((inputs.ep > 1) & ~folded, more_s, 0.0)
    both = np.where(inputs.experts > 0, exchange_s + more_s, 0.0)
    return both, both
