"""The convolutions of a network, timed on this machine by every method: `shoal analyze --measure`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn

from shoal.analysis.convolution import Convolution, best_by_depth, best_by_work, direct
from shoal.analysis.network import Network
from shoal.operators.measured import time_methods

MOST_WORK = 2e9
"""Multiply-adds of one forward that is timed: about a tenth of a second on one core. Larger layers are timed on fewer
samples."""
MOST_ELEMENTS = 5e7
"""Of the largest temporary."""
ROUNDS = 3


def measured_convolutions(network: Network, *, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every shape of 2-D convolution once: seconds of a forward and backward by method, and what was expected."""
    found: dict[Convolution, list[str]] = {}
    for layer in network.layers:
        if isinstance(layer.operator, Convolution) and len(layer.operator.kernel) == 2:
            found.setdefault(layer.operator, []).append(layer.name)
    rows = []
    for number, (operator, names) in enumerate(found.items(), start=1):
        samples = samples_for(operator)
        progress(f"timing convolution {number} of {len(found)}: {names[0]}, {samples} samples")
        conv = nn.Conv2d(
            operator.in_channels,
            operator.out_channels,
            _two(operator.kernel),
            stride=_two(operator.stride),
            padding=_two(operator.padding),
            dilation=_two(operator.dilation),
            groups=operator.groups,
            bias=False,
        )
        with torch.random.fork_rng(devices=[]):
            timing = time_methods(conv, (samples, operator.in_channels, *operator.image), rounds=ROUNDS)
        own = {name: each for name, each in timing.seconds.items() if name != "library"}
        rows.append(
            {
                "layers": names,
                "shape": operator.shape,
                "samples": samples,
                "seconds": timing.seconds,
                "best_by_work": best_by_work(operator),
                "best_by_depth": best_by_depth(operator),
                "best_by_time": min(own, key=lambda name: own[name]),
                "fastest": timing.best,
            }
        )
    return rows


def samples_for(operator: Convolution) -> int:
    """As many of the layer's samples as can be timed in a moment."""
    columns = operator.in_channels * prod(operator.kernel) * prod(operator.output)
    by_work = MOST_WORK * operator.samples / max(1, direct(operator).work)
    return int(max(1, min(operator.samples, by_work, MOST_ELEMENTS / columns)))


def _two(sides: tuple[int, ...]) -> tuple[int, int]:
    first, second = sides
    return first, second
