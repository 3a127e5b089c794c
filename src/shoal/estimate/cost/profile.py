"""`Profile`: the habits of a framework and of the cluster it ran on, as data, apart from the physics.

How long the host takes for a layer, what overlaps, which precision travels, what is recomputed under the name "selective".
A profile may be learned from some tens of one's own steps (`learn.py`). Fields hold a number, or a column of numbers once
the profiles of many rows are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

Number = Any
"""A float, or a column of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A good framework, unless told otherwise."""

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
    """Speed of the fused kernel on devices since Hopper, against its part of the peak on A100 (0.58: FlashAttention 2)."""
    elementwise: Number = 1.0
    """Bytes of memory-bound operations: below 1 where a compiler fuses them, above where nobody does."""
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
    buckets: Number = 0.1
    """Collectives of data parallelism for each layer: each pays its latency."""
    contention: Number = 0.27
    """zero 3: part of the shorter of computing and gathering that does not hide."""
    one_card: Number = 0.0
    """zero 3: 1 if a node's messages go through one network card."""
    hop_ratio: Number = 1.0
    """Latency between nodes, against the cluster's."""
    hop_power: Number = 0.0
    """It grows as this power of the ranks that a node has in the ring (0: cards work side by side)."""
    expert_hidden: Number = 0.0
    """Part of the experts' exchanges that hides."""
    # Pipelines.
    by_cost: Number = 0.0
    """1: layers are dealt to stages by estimated cost, the head counted; 0: evenly."""
    message_ratio: Number = 1.0
    """Latency of a message between stages, against the physics'."""
    # Stalls of one framework's host path.
    stall_tensor_s: Number = 0.0
    """Forward and backward of a layer, times tp to a power, where there is a pipeline (or a crowd, below; up to tp 16)."""
    stall_power: Number = 1.0
    stall_message_s: Number = 0.0
    """Each message between stages, where there is a crowd."""
    stall_reduce_s: Number = 0.0
    """Each byte of an all-reduce of gradients for each replica, where there is a crowd."""
    crowd_devices: Number = 1e9
    """From so many devices on,"""
    crowd_replicas: Number = 1e9
    """or from so many replicas on half as many devices, if they shard."""


GOOD = Profile()
MEGATRON_2021 = Profile(name="megatron-2021", host_layer_s=0.85e-3, flash=0.0, data_hidden=0.5)
MEGATRON = Profile(name="megatron", host_layer_s=0.85e-3, tensor_hidden=0.6, message_ratio=0.3)
MEGATRON_DEEPSPEED = replace(MEGATRON_2021, name="megatron-deepspeed")
DEEPSPEED = Profile(name="deepspeed-zero3", host_layer_s=0.85e-3, flash=0.0, one_card=1.0, contention=1.0)
MOSAIC = Profile(name="mosaic")
TORCHTITAN = Profile(
    name="torchtitan", selective_gemm=0.5, selective_attention=0.0, selective_rest=0.5, elementwise=1.4
)
NANOTRON = Profile(
    name="nanotron", host_layer_s=1.5e-3, gradient_bytes=4.0, shard_hidden=0.0, hop_ratio=5.0, hop_power=0.3, by_cost=1.0,
    buckets=0.3, stall_tensor_s=1.8e-3, stall_power=1.12, stall_message_s=0.3, stall_reduce_s=6e-12, crowd_devices=512,
    crowd_replicas=32,
)  # fmt: skip

PROFILES: dict[str, Profile] = {each.name: each for each in (
    GOOD, MEGATRON, MEGATRON_2021, MEGATRON_DEEPSPEED, DEEPSPEED, MOSAIC, TORCHTITAN, NANOTRON,
)}  # fmt: skip

COMPILED = 0.6
"""A compiler fuses memory-bound operations: their bytes, against those without. Fitted (torchtitan)."""
ASYNC_TENSOR = 0.55
"""Part of tp's messages that asynchronous tensor parallelism hides. Fitted (torchtitan)."""


def profile_for(framework: str, *, device: str = "", precision: str = "") -> Profile:
    """The profile of a framework by its name as people write it; a good one, if it is not known.

    Megatron-LM on A100 and older in fp16 is the one of 2021, without fused attention.
    """
    name = framework.lower()
    old = device.startswith(("V100", "A100")) and precision in ("fp16", "fp32", "tf32")
    if "nanotron" in name:
        found = NANOTRON
    elif "megatron-deepspeed" in name:
        found = MEGATRON_DEEPSPEED
    elif "deepspeed" in name and "megatron" not in name:
        found = DEEPSPEED
    elif "megatron" in name or "nemo" in name:
        found = MEGATRON_2021 if old and "core" not in name else MEGATRON
    elif "torchtitan" in name:
        found = TORCHTITAN
    elif "foundry" in name or "mosaic" in name or "mpt" in name:
        found = MOSAIC
    else:
        found = GOOD
    if "compile" in name and found is TORCHTITAN:
        found = replace(found, name="torchtitan-compiled", elementwise=found.elementwise * COMPILED)
    if "async-tp" in name or "async tp" in name:
        found = replace(found, name=f"{found.name}-async-tp", tensor_hidden=ASYNC_TENSOR)
    return found


def gathered(profiles: Sequence[Profile], index: np.ndarray) -> Profile:
    """Profiles of many rows as one whose fields are columns."""
    return Profile(name="rows", **{
        field.name: np.array([getattr(profile, field.name) for profile in profiles])[index]
        for field in fields(Profile) if field.name != "name"
    })  # fmt: skip
