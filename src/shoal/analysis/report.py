"""An analysis as a plain object: what `shoal analyze` prints, what `--json` gives, what the picture shows.

Blocks that repeat one after the other are reported once, with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shoal.analysis.brent import bounds_table
from shoal.analysis.concurrency import concurrency
from shoal.analysis.convolution import Convolution, algorithms, best_by_depth, best_by_work, real_work
from shoal.analysis.lookup import Unknown
from shoal.analysis.network import Network, intensity, parallelism
from shoal.analysis.operator import Cost


def report(network: Network) -> dict[str, Any]:
    """The analysis of a network."""
    unknown: dict[str, int] = {}
    for layer in network.layers:
        if isinstance(layer.operator, Unknown):
            unknown[layer.operator.name] = unknown.get(layer.operator.name, 0) + 1
    return {
        "network": network.name,
        "batch": network.batch,
        "parameters": network.parameters,
        "unit": "an operation: a multiply-add in products, one function of one number elsewhere; bytes are of float32",
        "totals": {
            name: _totals(cost)
            for name, cost in (("forward", network.forward), ("backward", network.backward), ("step", network.step))
        },
        "groups": groups(network),
        "concurrency": [asdict(axis) for axis in concurrency(network)],
        "bounds": [
            {**asdict(bounds), "speedup": list(bounds.speedup(network.step.work))}
            for bounds in bounds_table(network.step)
        ],
        "convolutions": convolutions(network),
        "unknown": unknown,
        "notes": list(network.notes),
    }


def _totals(cost: Cost) -> dict[str, Any]:
    return {**asdict(cost), "parallelism": parallelism(cost), "intensity": intensity(cost)}


def groups(network: Network) -> list[dict[str, Any]]:
    """Runs of equal blocks: their number, what one of them costs, and its layers."""
    found: list[dict[str, Any]] = []
    before: Any = None
    for name, numbers in network.blocks():
        content = _content(network, numbers)
        if content == before:
            found[-1]["count"] += 1
            found[-1]["last"] = name
            continue
        before = content
        layers = [_layer(network, number) for number in numbers]
        found.append(
            {
                "first": name,
                "last": name,
                "count": 1,
                "parameters": sum(layer["parameters"] for layer in layers),
                "forward": asdict(network.sub(numbers).forward),
                "backward_work": sum(
                    layer["input_gradient"]["work"] + layer["weight_gradient"]["work"] for layer in layers
                ),
                "layers": layers,
            }
        )
    return found


def _content(network: Network, numbers: Sequence[int]) -> Any:
    """What makes two blocks equal: operators, how they are joined, and where they begin."""
    first = numbers[0]
    return [
        (
            network.layers[number].operator,
            tuple(read - first for read in network.layers[number].inputs if read >= first),
        )
        for number in numbers
    ]


def _layer(network: Network, number: int) -> dict[str, Any]:
    layer = network.layers[number]
    return {
        "name": layer.name,
        "kind": layer.operator.kind,
        "shape": layer.operator.shape,
        "parameters": layer.operator.parameters,
        "forward": asdict(layer.operator.forward()),
        "input_gradient": asdict(network.input_gradient(number)),
        "weight_gradient": asdict(layer.operator.weight_gradient()),
        "unknown": isinstance(layer.operator, Unknown),
    }


def convolutions(network: Network) -> list[dict[str, Any]]:
    """Every shape of convolution once, with all algorithms that can compute it."""
    found: dict[Convolution, list[str]] = {}
    for layer in network.layers:
        if isinstance(layer.operator, Convolution):
            found.setdefault(layer.operator, []).append(layer.name)
    return [
        {
            "layers": names,
            "shape": operator.shape,
            "algorithms": {
                name: {**asdict(cost), "real_work": real_work(name, cost)}
                for name, cost in algorithms(operator).items()
            },
            "best_by_work": best_by_work(operator),
            "best_by_depth": best_by_depth(operator),
        }
        for operator, names in found.items()
    ]
