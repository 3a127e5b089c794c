"""The operators of a network as calls that a `Machine` can time: a kind, and sizes that micro-batches and ranks divide.

A network is traced once; its operations are then taken at any number of samples, since all that grows with them is
the rows of products and the elements of everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.analysis.convolution import Convolution, TransposedConvolution
from shoal.analysis.elementwise import Activation, Concatenation
from shoal.analysis.lookup import Embedding
from shoal.analysis.network import Network
from shoal.analysis.operator import ELEMENT_BYTES, Operator
from shoal.analysis.products import AttentionProduct
from shoal.analysis.reductions import BatchNorm, LayerNorm, Loss, Pooling, Softmax
from shoal.estimate.steps.machine import Machine

PRODUCTS = ("linear", "convolution", "attention")
SMOOTH = frozenset("gelu silu tanh sigmoid exp log erf pow sin cos softplus mish elu log_sigmoid_forward".split())
"""Functions that take as long as gelu; the others take as long as relu."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One call, forward and backward."""

    kind: str
    name: str
    """The module that makes it."""
    piece: str
    """The piece of the model it belongs to, or "loss"."""
    count: float = 1.0
    rows: float = 0.0
    columns: float = 0.0
    inner: float = 0.0
    """Of products."""
    elements: float = 0.0
    """Of passes over memory: numbers written, or read where those are more."""
    input_gradient: bool = True
    weight_gradient: bool = False

    def of_samples(self, ratio: float) -> Operation:
        """The same for `ratio` times as many samples."""
        if self.kind == "attention" or self.count > 1:
            return replace(self, count=self.count * ratio)
        return replace(self, rows=self.rows * ratio, elements=self.elements * ratio)

    def cut(self, ranks: int, *, along: str) -> Operation:
        """One rank's part, where one of its sides (or all its elements) is split."""
        if self.kind not in PRODUCTS:
            return replace(self, elements=self.elements / ranks)
        if self.kind == "attention" or (self.count > 1 and along != "rows"):
            return replace(self, count=self.count / ranks)
        return replace(self, **{along: getattr(self, along) / ranks})

    @property
    def kept_bytes(self) -> float:
        """What its result takes until backward has come to it."""
        if self.kind == "attention":
            return ELEMENT_BYTES * self.count * self.rows * self.inner
        if self.kind in PRODUCTS:
            return ELEMENT_BYTES * self.count * self.rows * self.columns
        return ELEMENT_BYTES * self.elements

    def forward_s(self, machine: Machine) -> float:
        if self.kind in PRODUCTS:
            return machine.products[self.kind][0].seconds(self.count, self.rows, self.columns, self.inner)
        return machine.passes[self.kind][0].at(self.elements)

    def backward_s(self, machine: Machine) -> tuple[float, float]:
        """(gradient of the input, gradient of the weight)"""
        if self.kind in PRODUCTS:
            both = machine.products[self.kind][1].seconds(self.count, self.rows, self.columns, self.inner)
            if self.kind == "attention" or not self.weight_gradient:
                return both, 0.0
            return (both / 2, both / 2) if self.input_gradient else (0.0, both / 2)
        total_s = machine.passes[self.kind][1].at(self.elements)
        if self.kind == "embedding":
            return 0.0, total_s
        return (total_s, 0.0) if self.input_gradient else (0.0, 0.0)


def operations(network: Network) -> tuple[Operation, ...]:
    """Of a traced network, in order."""
    return tuple(
        replace(
            _operation(layer.operator, layer.name, layer.block),
            input_gradient=network.needs_input_gradient[number],
            weight_gradient=layer.operator.learns,
        )
        for number, layer in enumerate(network.layers)
    )


def _operation(operator: Operator, name: str, piece: str) -> Operation:
    sides = operator.sides
    if isinstance(operator, AttentionProduct):
        # Timed under a causal mask, which leaves half of the scores.
        full = 1.0 if operator.causal else 2.0
        return Operation(
            kind="attention",
            name=name,
            piece=piece,
            count=full * operator.samples * operator.heads,
            rows=operator.queries,
            columns=operator.keys,
            inner=operator.head_dim,
        )
    if sides is not None:
        kind = "convolution" if isinstance(operator, Convolution | TransposedConvolution) else "linear"
        return Operation(
            kind=kind,
            name=name,
            piece=piece,
            count=sides.count,
            rows=sides.rows,
            columns=sides.columns,
            inner=sides.inner,
        )
    return Operation(kind=_pass(operator), name=name, piece=piece, elements=operator.numbers)


def _pass(operator: Operator) -> str:
    match operator:
        case Activation():
            return "gelu" if operator.function in SMOOTH else "relu"
        case Concatenation():
            return "copy"
        case LayerNorm():
            return "layer norm"
        case BatchNorm():
            return "batch norm"
        case Pooling():
            # A window that is the full image is a mean, which streams.
            return "relu" if operator.kernel == operator.image else "pooling"
        case Softmax() | Loss():
            return "loss"
        case Embedding():
            return "embedding"
    return "add"
