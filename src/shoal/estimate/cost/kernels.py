"""Seconds of single kernels: matrix products by their shape, fused and plain attention, memory-bound passes."""

from __future__ import annotations

import numpy as np

from shoal.estimate.cost.constants import Physics
from shoal.estimate.cost.inputs import PRECISIONS, Column, Inputs
from shoal.estimate.cost.profile import Profile

TILES = ((256, 128, 1.0), (128, 128, 1.1), (64, 64, 1.6))
"""Rows, columns, and the relative cost of a tile's arithmetic: small tiles reuse less."""
HOPPER_FLOPS = 5e14
"""Devices since Hopper multiply faster than this; their fused attention is another kernel."""


def product_s(
    inputs: Inputs, physics: Physics, m: Column, n: Column, k: Column, *, count: Column | float = 1.0, rate: Column
) -> Column:
    """`count` products of (m, k) by (k, n), run as one grouped kernel."""
    m, n, k = np.maximum(m, 1.0), np.maximum(n, 1.0), np.maximum(k, 1.0)
    excess = np.inf
    for rows, columns, cost in TILES:
        tiles_m, tiles_n = np.ceil(m / rows), np.ceil(n / columns)
        tiles = count * tiles_m * tiles_n
        waves = np.ceil(tiles / inputs.sms) * inputs.sms / tiles
        excess = np.minimum(excess, tiles_m * tiles_n * (rows * columns) / (m * n) * waves * cost)
    shape = (1 + physics.depth / k) * (1 + physics.edge / m) * (1 + physics.edge / n)
    ideal_s = 2 * count * m * n * k / (physics.matmul * rate)
    element_bytes = np.where(inputs.wide, 4.0, 2.0)
    moved_s = count * (m * n + m * k + n * k) * element_bytes / (physics.memory * inputs.memory_bytes_per_s)
    return np.maximum(ideal_s * (1 + physics.quantised * (excess - 1)) * shape, moved_s) + physics.kernel_s


def linear_s(
    inputs: Inputs,
    physics: Physics,
    rows: Column,
    width_in: Column,
    width_out: Column,
    *,
    count: Column | float = 1.0,
    narrow: bool = True,
) -> tuple[Column, Column, Column]:
    """(forward, gradient of the input, gradient of the weight) of a linear layer; in fp8 if the row says so and
    `narrow`.
    """
    row_wise = inputs.precision == PRECISIONS.index("fp8-rowwise")
    eight = (inputs.fp8 | row_wise) & narrow
    gain = np.where(row_wise, physics.fp8_row_gain, physics.fp8_gain)
    rate = inputs.matmul_flops * np.where(eight, gain, 1.0)
    # Operands are scaled and written anew in eight bits: activations and gradients for every product, weights once a
    # step for each of the two products they enter.
    cast_s = count * np.where(eight, physics.cast_bytes, 0.0) / (physics.memory * inputs.memory_bytes_per_s)
    weight = width_in * width_out / inputs.micro_batches

    def one(m: Column, n: Column, k: Column, cast: Column) -> Column:
        return product_s(inputs, physics, m, n, k, count=count, rate=rate) + cast_s * cast

    return (
        one(rows, width_out, width_in, rows * width_in + weight),
        one(rows, width_in, width_out, rows * width_out + weight),
        one(width_out, width_in, rows, rows * (width_in + width_out)),
    )


def attention_s(inputs: Inputs, profile: Profile, physics: Physics) -> tuple[Column, Column]:
    """(forward, backward) of one layer's attention proper on one rank, for one micro-batch."""
    length, batch = inputs.sequence_length, inputs.micro_batch
    heads = inputs.heads / inputs.tp
    width = inputs.hidden / inputs.heads
    flops = 4 * batch * heads * length * length * width / inputs.cp
    rate = inputs.matmul_flops * np.where(inputs.matmul_flops > HOPPER_FLOPS, profile.flash_hopper, 1.0)
    # A fused kernel gives each processor a block of 128 queries of one head: few of them leave processors idle.
    busy = np.minimum(1.0, batch * heads * np.ceil(length / inputs.cp / 128) / inputs.sms)
    part = np.where(inputs.causal > 0, 0.5, 1.0)
    fused_forward = flops * part / (physics.flash_forward * rate * busy) + physics.kernel_s
    fused_backward = 2.5 * flops * part / (physics.flash_backward * rate * busy) + 2 * physics.kernel_s
    # Without fusion: two batched products over the full square, and passes over the scores.
    scores_bytes = batch * heads * length * length / inputs.cp * np.where(inputs.wide, 4.0, 2.0)
    streams = physics.memory * inputs.memory_bytes_per_s
    products_s = flops / (0.7 * physics.matmul * inputs.matmul_flops)
    plain_forward = products_s + physics.scores_forward * scores_bytes / streams + 6 * physics.kernel_s
    plain_backward = 2 * products_s + physics.scores_backward * scores_bytes / streams + 9 * physics.kernel_s
    fused = np.asarray(profile.flash) > 0
    return np.where(fused, fused_forward, plain_forward), np.where(fused, fused_backward, plain_backward)


def streamed_s(inputs: Inputs, physics: Physics, moved_bytes: Column) -> Column:
    """A pass over memory."""
    return moved_bytes / (physics.memory * inputs.memory_bytes_per_s)
