"""A formula for each ATen operation: which operator it is, read off its arguments.

What has no formula here is `Unknown`: named, counted by its shapes, and flagged in every report.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Protocol

from shoal.analysis.convolution import Convolution, TransposedConvolution
from shoal.analysis.elementwise import Activation, Add, Concatenation, Learned, Multiply
from shoal.analysis.lookup import Embedding, Unknown
from shoal.analysis.operator import Operator
from shoal.analysis.products import FullyConnected, MatrixProduct
from shoal.analysis.reductions import BatchNorm, LayerNorm, Pooling, Reduction, Softmax
from shoal.layout.cost import LEFT, UNWRITTEN, VIEWS
from shoal.layout.recorded import Op, Ref, Value

FREE = VIEWS | UNWRITTEN | frozenset("zeros_like ones_like new_zeros new_empty full_like".split())
"""Operations that move nothing, or make what does not depend on the model."""

COPIES = frozenset(
    "clone copy copy_ _to_copy contiguous cat stack constant_pad_nd index index_select gather roll flip repeat pad "
    "repeat_interleave slice_scatter select_scatter masked_select upsample_nearest2d pixel_shuffle".split()
)
ADDITIONS = frozenset("add add_ index_add index_add_ index_put index_put_ scatter_add scatter_add_".split())
PRODUCTS = frozenset("mul mul_".split())
ELEMENTWISE = frozenset(
    "relu relu_ gelu silu silu_ tanh tanh_ sigmoid sigmoid_ exp log sqrt rsqrt neg abs sin cos erf pow square "
    "leaky_relu leaky_relu_ elu elu_ hardtanh hardtanh_ hardswish hardswish_ hardsigmoid softplus mish clamp clamp_min "
    "clamp_max clamp_ reciprocal native_dropout dropout bernoulli bernoulli_ masked_fill masked_fill_ where tril triu "
    "sign rsub log1p expm1 sub sub_ div div_ minimum maximum lerp threshold log_sigmoid_forward".split()
)
REDUCTIONS = frozenset(
    "sum mean amax amin max min var std var_mean prod norm linalg_vector_norm logsumexp topk cumsum".split()
)


class TraceReader(Protocol):
    """What a formula may ask of the trace."""

    def value(self, number: int) -> Value: ...

    def parameter(self, number: int) -> int | None:
        """The parameter that a value is, or is a view of."""

    def claim(self, number: int, elements: int) -> int:
        """Takes `elements` of a parameter for an operator; fewer where other operators took them before."""


def operator_of(reader: TraceReader, op: Op) -> Operator:
    """The operator that an operation is."""
    formula = FORMULAS.get(op.name)
    operator = formula(reader, op) if formula is not None else None
    return operator if operator is not None else _by_shapes(reader, op)


def _by_shapes(reader: TraceReader, op: Op) -> Operator:
    elements = reader.value(op.outputs[0]).numel
    weights = sum(reader.claim(number, reader.value(number).numel) for number in dict.fromkeys(op.inputs))
    name = op.name.rstrip("_")
    if weights and op.name in ADDITIONS | PRODUCTS | ELEMENTWISE | COPIES:
        return Learned(function=name, elements=elements, weights=weights)
    if op.name in ADDITIONS:
        return Add(elements=elements)
    if op.name in PRODUCTS:
        several = sum(reader.value(number).learned for number in op.inputs) > 1
        return Multiply(elements=elements) if several else Activation(function="scale", elements=elements)
    if op.name in ELEMENTWISE:
        return Activation(function=name, elements=elements)
    if op.name in COPIES:
        return Concatenation(elements=elements)
    read = sum(reader.value(number).numel for number in op.inputs)
    if op.name in REDUCTIONS and not weights:
        return Reduction(function=name, elements=max(read, elements), outputs=elements)
    written = sum(reader.value(number).numel for number in op.outputs)
    return Unknown(name=op.name, read=read, written=written, weights=weights)


def _tensors(op: Op) -> list[int]:
    """The tensors among its arguments, in order."""
    return [arg.value for arg in op.args if isinstance(arg, Ref)]


def _shape(reader: TraceReader, op: Op) -> tuple[int, ...]:
    return reader.value(_tensors(op)[0]).shape


def _product(first: int, *, bias: bool) -> Callable[[TraceReader, Op], Operator]:
    """A product of two tensors, from the argument `first` on: fully connected where the second is a parameter."""

    def formula(reader: TraceReader, op: Op) -> Operator:
        tensors = _tensors(op)
        left, right = (reader.value(number).shape for number in tensors[first : first + 2])
        weight = tensors[first + 1]
        if reader.parameter(weight) is None or len(right) != 2:
            return MatrixProduct(batch=prod(left[:-2]), rows=left[-2], inner=left[-1], columns=right[-1])
        added = bias and reader.claim(tensors[0], right[1]) > 0
        tied = reader.claim(weight, prod(right)) == 0
        return FullyConnected(rows=left[0], inputs=right[0], outputs=right[1], bias=added, tied=tied)

    return formula


def _convolution(reader: TraceReader, op: Op) -> Operator | None:
    stride, padding, dilation, transposed, _, groups = op.args[3:9]
    tensors = _tensors(op)
    if reader.parameter(tensors[1]) is None:
        return None
    image, weight = (reader.value(number).shape for number in tensors[:2])
    for number in tensors[1:]:
        reader.claim(number, reader.value(number).numel)
    kernel = weight[2:]
    if transposed:
        image = reader.value(op.outputs[0]).shape
    plain = Convolution(
        samples=image[0],
        in_channels=image[1],
        out_channels=weight[0],
        image=image[2:],
        kernel=kernel,
        stride=_sides(stride, kernel),
        padding=_sides(padding, kernel),
        dilation=_sides(dilation, kernel),
        groups=int(groups),
        bias=len(tensors) > 2,
    )
    return TransposedConvolution(back_through=plain, bias=plain.bias) if transposed else plain


def _sides(given: Any, like: tuple[int, ...]) -> tuple[int, ...]:
    """One number stands for all dimensions."""
    return tuple(given) if len(given) == len(like) else tuple(given) * len(like)


def _pooling(reader: TraceReader, op: Op) -> Operator | None:
    shape, output = _shape(reader, op), reader.value(op.outputs[0]).shape
    kernel = op.args[1]
    if "adaptive" in op.name:
        kernel = [-(-side // out) for side, out in zip(shape[2:], output[2:], strict=True)]
    return Pooling(
        samples=shape[0], channels=shape[1], image=shape[2:], output=output[2:], kernel=_sides(kernel, shape[2:])
    )


def _mean(reader: TraceReader, op: Op) -> Operator | None:
    """The mean of full images is a pooling."""
    shape = _shape(reader, op)
    over = op.args[1] if len(op.args) > 1 else None
    if len(shape) != 4 or not isinstance(over, list | tuple) or {dim % 4 for dim in over} != {2, 3}:
        return None
    return Pooling(samples=shape[0], channels=shape[1], image=shape[2:], output=(1, 1), kernel=shape[2:])


def _batch_norm(reader: TraceReader, op: Op) -> Operator:
    shape = _shape(reader, op)
    for number in op.inputs[1:]:
        reader.claim(number, shape[1])
    return BatchNorm(samples=shape[0], channels=shape[1], image=shape[2:])


def _layer_norm(reader: TraceReader, op: Op) -> Operator:
    shape, width = _shape(reader, op), prod(op.args[1])
    weights = [arg.value for arg in op.args[2:4] if isinstance(arg, Ref)]
    for number in weights:
        reader.claim(number, width)
    return LayerNorm(rows=prod(shape) // width, width=width, bias=len(weights) > 1, affine=bool(weights))


def _softmax(reader: TraceReader, op: Op) -> Operator:
    shape = _shape(reader, op)
    width = shape[op.args[1]] if shape else 1
    return Softmax(rows=prod(shape) // width, width=width)


def _embedding(reader: TraceReader, op: Op) -> Operator | None:
    table, numbers = (reader.value(number) for number in _tensors(op)[:2])
    if reader.parameter(table.number) is None:
        return None
    reader.claim(table.number, table.numel)
    return Embedding(lookups=numbers.numel, table=table.shape[0], width=table.shape[1])


FORMULAS: dict[str, Callable[[TraceReader, Op], Operator | None]] = {
    **{name: _product(first, bias=name == "addmm") for name, first in LEFT.items()},
    "convolution": _convolution,
    "max_pool2d_with_indices": _pooling,
    "max_pool3d_with_indices": _pooling,
    "avg_pool2d": _pooling,
    "avg_pool3d": _pooling,
    "_adaptive_avg_pool2d": _pooling,
    "_adaptive_avg_pool3d": _pooling,
    "adaptive_max_pool2d": _pooling,
    "mean": _mean,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "native_layer_norm": _layer_norm,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "embedding": _embedding,
}
