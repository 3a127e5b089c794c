"""A network as a graph of operators: work adds up, depth is the longest path.

In series that is the sum of depths, in parallel branches the largest; a graph holds both and anything in between
(residual connections, query, key and value side by side). Backward runs the graph the other way round. Gradients of
weights hang off that path: nothing waits for them but the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from shoal.analysis.operator import NOTHING, Cost, Operator


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One operator in its place."""

    name: str
    operator: Operator
    inputs: tuple[int, ...] = ()
    """Numbers of the layers whose results it reads; data and constants are not counted."""
    block: str = ""
    """The part of the network it belongs to: repeated blocks are reported once."""
    experts: int = 0
    """Where it is part of an expert: the number of experts, itself included."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What one training step of a batch computes."""

    name: str
    batch: int
    layers: tuple[Layer, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            for read in layer.inputs:
                if not 0 <= read < number:
                    raise ValueError(f"layer {number} ({layer.name}) reads layer {read}, which does not come before it")

    @property
    def parameters(self) -> int:
        return sum(layer.operator.parameters for layer in self.layers)

    @cached_property
    def needs_input_gradient(self) -> tuple[bool, ...]:
        """Of each layer: whether anything before it learns."""
        learns: list[bool] = []
        needs: list[bool] = []
        for layer in self.layers:
            needs.append(any(learns[read] for read in layer.inputs))
            learns.append(needs[-1] or layer.operator.learns)
        return tuple(needs)

    def input_gradient(self, number: int) -> Cost:
        """Of one layer; nothing where its input is data."""
        return self.layers[number].operator.input_gradient() if self.needs_input_gradient[number] else NOTHING

    @cached_property
    def forward(self) -> Cost:
        costs = [layer.operator.forward() for layer in self.layers]
        done = [0] * len(costs)
        for number, layer in enumerate(self.layers):
            done[number] = max((done[read] for read in layer.inputs), default=0) + costs[number].depth
        return _total(costs, depth=max(done, default=0))

    @cached_property
    def backward(self) -> Cost:
        """Both gradients of every layer, each as soon as what it needs is there."""
        by_input = [self.input_gradient(number) for number in range(len(self.layers))]
        by_weight = [layer.operator.weight_gradient() for layer in self.layers]
        start = [0] * len(self.layers)
        end = 0
        for number in reversed(range(len(self.layers))):
            passed_on = start[number] + by_input[number].depth
            end = max(end, passed_on, start[number] + by_weight[number].depth)
            for read in self.layers[number].inputs:
                start[read] = max(start[read], passed_on)
        return _total([*by_input, *by_weight], depth=end)

    @cached_property
    def step(self) -> Cost:
        """Forward and backward, without the optimiser."""
        return Cost(
            self.forward.work + self.backward.work,
            self.forward.depth + self.backward.depth,
            self.forward.bytes + self.backward.bytes,
        )

    def blocks(self) -> list[tuple[str, tuple[int, ...]]]:
        """Blocks in the order in which they begin: (name, numbers of their layers)."""
        runs = groupby(range(len(self.layers)), key=lambda number: self.layers[number].block)
        return [(name, tuple(numbers)) for name, numbers in runs]

    def sub(self, numbers: Sequence[int]) -> Network:
        """Some of the layers as a network of their own; what they read from outside counts as data."""
        place = {number: index for index, number in enumerate(numbers)}
        layers = tuple(
            Layer(
                name=self.layers[number].name,
                operator=self.layers[number].operator,
                inputs=tuple(place[read] for read in self.layers[number].inputs if read in place),
                experts=self.layers[number].experts,
            )
            for number in numbers
        )
        return Network(name=self.name, batch=self.batch, layers=layers)


def parallelism(cost: Cost) -> float:
    """Average parallelism W/D: the most processors that could be busy throughout."""
    return cost.work / max(cost.depth, 1)


def intensity(cost: Cost) -> float:
    """Operations for each byte that moves."""
    return cost.work / max(cost.bytes, 1)


def _total(costs: Sequence[Cost], *, depth: int) -> Cost:
    return Cost(sum(cost.work for cost in costs), depth, sum(cost.bytes for cost in costs))


@dataclass(slots=True)
class NetworkBuilder:
    """Layers one after the other: `add` gives the number by which later ones read a result."""

    name: str
    batch: int
    block: str = ""
    layers: list[Layer] = field(default_factory=list)

    def add(self, name: str, operator: Operator, *inputs: int | None, experts: int = 0) -> int:
        """None among the inputs is data."""
        read = tuple(dict.fromkeys(number for number in inputs if number is not None))
        self.layers.append(Layer(name=name, operator=operator, inputs=read, block=self.block or name, experts=experts))
        return len(self.layers) - 1

    def network(self, *notes: str) -> Network:
        return Network(name=self.name, batch=self.batch, layers=tuple(self.layers), notes=notes)
