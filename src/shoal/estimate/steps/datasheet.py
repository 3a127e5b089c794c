"""The `Machine` of a cluster that nobody has measured: what `shoal calibrate` would time is put together from the
datasheet of its device, its links, and the constants of kernels fitted on published steps (`cost/constants.py`).

An operator costs the host's launch, and its arithmetic or its bytes on the device. That is an upper bound where one
hides behind the other; what models are compared by, it keeps in order.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.cluster.cluster import Cluster
from shoal.estimate.cost.constants import PHYSICS, Physics
from shoal.estimate.cost.profile import Profile
from shoal.estimate.steps.machine import Curve, Machine, Product

GOOD = Profile()
LAUNCHES = 40
"""Kernels of one layer's forward, whose launches together take the profile's `host_layer_s`."""
FUSED_BACKWARD = 2.5
"""Work of the backward of fused attention, against its forward."""
PRECISION = "fp32"
"""In which trials compute where their strategy names no other."""
ELEMENT_BYTES = 4.0
SIZES = tuple(float(1 << power) for power in range(4, 41, 2))
UPDATED_BYTES = {"SGD": 5 * ELEMENT_BYTES, "AdamW": 7 * ELEMENT_BYTES}
"""Read and written for each parameter: itself, its gradient, and one or two moments."""


def machine_of_cluster(cluster: Cluster, *, world: int, precision: str = PRECISION) -> Machine:
    """A cluster's device as a machine of `world` ranks."""
    device, physics = cluster.device, PHYSICS
    launch_s = float(GOOD.host_layer_s) / LAUNCHES
    rate = physics.matmul * (device.matmul(precision) or device.peak(precision))
    streams = physics.memory * device.memory_bytes_per_s

    def product(*, slower: float = 1.0, launches: float = 1.0) -> Product:
        return Product(
            start_s=launches * launch_s,
            flops=rate / slower,
            rows=physics.edge,
            columns=physics.edge,
            inner=physics.depth,
        )

    def curve(bytes_each: float, *, launches: float = 1.0) -> Curve:
        return _curve(lambda elements: launches * launch_s + elements * bytes_each / streams)

    def passed(reads: float, more: float) -> tuple[Curve, Curve]:
        """A pass that moves so many numbers for each element, forward and backward."""
        each = ELEMENT_BYTES * physics.elementwise
        return curve(reads * each), curve(more * each, launches=float(GOOD.host_backward))

    loss = (curve(physics.loss_bytes / 3), curve(physics.loss_bytes * 2 / 3, launches=float(GOOD.host_backward)))
    linear = (product(), product(launches=2))
    return Machine(
        ranks=max(2, world),
        memory_bytes=device.memory_bytes * world,
        memory_bytes_per_s=streams,
        products={
            # Both gradients of a product are one entry, of two products.
            "linear": (linear[0], _twice(linear[1])),
            "convolution": (linear[0], _twice(linear[1])),
            "attention": (
                product(slower=1 / physics.flash_forward),
                product(slower=FUSED_BACKWARD / physics.flash_backward, launches=2),
            ),
        },
        passes={
            "add": passed(3, 2),
            "relu": passed(2, 3),
            "gelu": passed(2, 3),
            "copy": passed(2, 2),
            "layer norm": passed(2, 4),
            "batch norm": passed(3, 5),
            "pooling": passed(2, 2),
            "embedding": passed(2, 2),
            "loss": loss,
        },
        updates={name: curve(nbytes) for name, nbytes in UPDATED_BYTES.items()},
        collectives=_collectives(cluster, world, physics),
        background_byte_s=1e-12,
        overheads={"step_s": physics.fixed_s, "pass_s": float(GOOD.host_pass_s)},
        codecs={},
    )


def _twice(product: Product) -> Product:
    return Product(
        start_s=product.start_s,
        flops=product.flops / 2,
        rows=product.rows,
        columns=product.columns,
        inner=product.inner,
    )


def _curve(seconds: Callable[[float], float]) -> Curve:
    return Curve(SIZES, tuple(seconds(size) for size in SIZES))


def _collectives(cluster: Cluster, world: int, physics: Physics) -> dict[str, Curve]:
    """Rings over the levels that so many ranks reach: the slowest link's bandwidth, every hop's latency."""
    ranks, below, hops_s, rate = max(2, world), 1, 0.0, float("inf")
    for number, level in enumerate(cluster.levels):
        units = min(level.ranks, -(-ranks // below))
        if units > 1:
            part = physics.bus if number == 0 else physics.network
            links = below if number else 1  # As many rings cross a level as ranks lie below it.
            rate = min(rate, level.bytes_per_s * part * links)
            hops_s += (units - 1) * level.latency_s
        below *= level.ranks
    share = (ranks - 1) / ranks

    def of(rounds: int) -> Curve:
        return _curve(lambda nbytes: physics.collective_s + rounds * (hops_s + share * nbytes / rate))

    hop_s = hops_s / (ranks - 1)
    return {
        "all_reduce": of(2),
        "reduce_scatter": of(1),
        "all_gather": of(1),
        "all_to_all": of(1),
        "send": _curve(lambda nbytes: physics.collective_s + hop_s + nbytes / rate),
    }
