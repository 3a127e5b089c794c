"""`Physics`: the constants of kernels and links that hold for every framework, each with its origin.

"fitted" means: on step times published for vTrain, nanotron, MosaicML, torchtitan, Narayanan 2021, Korthikanti 2022 and
Megatron-LM's README together, sources weighted by n^-0.35, with a prior around the value written down before
(`benchmarks/fit_costs.py`). What belongs to one framework is a `Profile`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Physics:
    """Plain numbers."""

    # Matrix products.
    matmul: float = 0.964
    """Large products, as a part of the measured maximum. Fitted."""
    quantised: float = 0.459
    """How much of the loss by full tiles and full waves is felt (a scheduler hides the rest). Fitted."""
    depth: float = 122
    """A product over K terms takes 1 + depth/K times its ideal: filling the pipeline of loads. Fitted."""
    edge: float = 36.2
    """As depth, for the rows and columns of the result. Fitted."""
    kernel_s: float = 4e-6
    """Start of a kernel on the device. Known: CUDA launches back to back."""
    fp8_gain: float = 1.93
    """Products in fp8 with one scale a tensor, against bf16. Fitted (torchtitan)."""
    fp8_row_gain: float = 0.968
    """With one scale a row. Fitted (torchtitan)."""
    cast_bytes: float = 2.61
    """For each operand of a product in fp8: read in 16 bits, write in 8. Fitted (torchtitan) around the count."""
    # Memory.
    memory: float = 0.8
    """Part of the datasheet's bandwidth that a streaming kernel gets. Known: STREAM-like measurements."""
    elementwise: float = 1.22
    """Bytes moved by norms, activations, residuals, against the count of each operand once. Fitted."""
    loss_bytes: float = 31.8
    """For each logit, forward and backward of the loss in 32 bits. Counted: about six passes of four bytes."""
    optimizer_bytes: float = 29.7
    """For each parameter, Adam in mixed precision: read and write master, two moments, gradient, weight. Fitted."""
    # Attention.
    flash_forward: float = 0.596
    """Fused attention, as a part of the measured maximum. Fitted."""
    flash_backward: float = 0.299
    """Its backward, which does 2.5 times the work. Fitted."""
    scores_forward: float = 6.62
    """Passes over the score matrix without fusion: scale, mask, softmax, dropout. Fitted."""
    scores_backward: float = 9.87
    """As above, backward. Fitted."""
    # Links.
    bus: float = 0.921
    """Part of the innermost links' datasheet bandwidth that a collective gets. Fitted."""
    network: float = 0.92
    """The same between nodes. Measured: 370 of 400 GB/s over 16 nodes of H200, nccl-tests."""
    collective_s: float = 1.61e-05
    """Start of a collective. Fitted (nccl-tests)."""
    ramp: float = 0.609
    """A message near its latency gets less bandwidth: t = a + w + ramp * sqrt(a w). Fitted (nccl-tests)."""
    hop_ratio: float = 0.865
    """Latency of a hop between nodes as collectives show it, against the level's own figure. Fitted."""
    message_s: float = 0.000241
    """A message from stage to stage, with its wait. Fitted."""
    jitter: float = 0.0124
    """Slowest of many nodes: each doubling adds this part. Fitted."""
    fixed_s: float = 0.00414
    """Once a step: data, clipping, logging. Fitted."""
    blend: float = 4.22
    """Host and device: (h^blend + d^blend)^(1/blend), a maximum with its corner rounded. Fitted."""
    skew: float = 1.78
    """Ranks of tp wait for the slowest host among them: that part of the host's time grows as tp^skew. Fitted."""
    imbalance: float = 1.1
    """The busiest expert rank, against the mean. Assumed: balanced by an auxiliary loss."""


PHYSICS = Physics()
