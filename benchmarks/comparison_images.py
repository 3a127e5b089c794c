"""VGG-16 of the comparison of Nichols et al. 2021: replicated on Lassen and ThetaGPU, and on one device in GPipe's
micro-batches. Work, outputs and parameters are counted by `shoal.analysis`; times are those of
`benchmarks/replicated.py`, whose constants were fitted on other networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from benchmarks.replicated import HABITS, KINDS, PRECISIONS, WORKS, Work, step_times

from shoal.analysis import preset_network
from shoal.cluster import cluster

SAMPLES = 64
"""A device, as published."""
IMAGES = 1_281_167
"""Of ImageNet's training set."""
PRECISION = {"lassen": "fp32", "thetagpu": "tf32"}
"""Assumed: what PyTorch of 2021 does on these devices unless told otherwise (convolutions of an A100 run in TF32)."""
DEVICES = (1, 2, 4, 8, 16, 32, 64)
PRODUCTS = ("Convolution", "FullyConnected")


@cache
def vgg16() -> Work:
    """Counted. `numbers` stands for bytes of what is memory-bound; the fitted passes are those of ResNet-50, with a
    norm behind each convolution, so VGG's are taken in proportion to the bytes that both networks' operators must move.
    """
    network = preset_network("vgg16", batch=SAMPLES)
    products = [layer.operator for layer in network.layers if type(layer.operator).__name__ in PRODUCTS]
    numbers = WORKS["resnet50"].numbers * _between("vgg16") / _between("resnet50")
    return Work(
        flops=2 * sum(each.forward().work for each in products) / SAMPLES,
        numbers=numbers,
        parameters=network.parameters,
        layers=len(network.layers),
    )


def _between(name: str) -> float:
    """Bytes that operators other than products must move for a sample, forward and backward."""
    network = preset_network(name, batch=SAMPLES)
    rest = [layer.operator for layer in network.layers if type(layer.operator).__name__ not in PRODUCTS]
    return (
        sum(each.forward().bytes + each.input_gradient().bytes + each.weight_gradient().bytes for each in rest)
        / SAMPLES
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated:
    """VGG-16 on some devices."""

    step_s: float
    messages: float
    """Part of the step that gradients add."""

    def epoch_s(self, devices: int) -> float:
        """64 samples a device."""
        return self.step_s * IMAGES / (SAMPLES * devices)


def step_s(place: str, devices: int, *, micro_batch: int = SAMPLES, again: bool = False, links: float = 1.0) -> float:
    """Seconds. `again`: forward is computed a second time, so a pass does four thirds of the work; `links`: how many
    times as fast they are.
    """
    work, where = vgg16(), cluster(place, devices=max(devices, cluster(place).node))
    part, passes = where.device, 4 / 3 if again else 1.0
    given = {
        "flops": passes * work.flops,
        "numbers": passes * work.numbers,
        "parameters": work.parameters,
        "layers": passes * work.layers,
        "kind": KINDS.index(work.kind),
        "precision": PRECISIONS.index(PRECISION[place]),
        "peak": part.peak(PRECISION[place]),
        "stream": part.memory_bytes_per_s,
        "gpus": devices,
        "node": where.node,
        "intra": links * where.levels[0].bytes_per_s,
        "inter": links * where.levels[1].bytes_per_s,
        "batch": micro_batch,
        "micro": SAMPLES // micro_batch,
        "habit": list(HABITS).index("pytorch"),
    }
    return float(step_times({name: np.array([value]) for name, value in given.items()})[0])


def replicated(place: str, devices: int) -> Replicated:
    """DDP on so many devices."""
    whole_s = step_s(place, devices)
    return Replicated(step_s=whole_s, messages=1 - step_s(place, devices, links=1e9) / whole_s)


def single_gpipe(place: str, *, micro_batch: int) -> float:
    """How much slower one device is in GPipe's micro-batches, computed twice, than DDP on one."""
    return step_s(place, 1, micro_batch=micro_batch, again=True) / step_s(place, 1)
