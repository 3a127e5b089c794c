"""Times single operators on every rank at once, as training runs them: through autograd, on memory that is not at hand.

Matrix products, convolutions and attention at some shapes each; operators that pass over memory at some sizes; and the
optimiser's update. All ranks compute at the same time, since they share the memory's bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROTATED_BYTES = 24 << 20
"""Bytes of inputs that are taken in turn: a layer's tensors have left the cache when their next pass comes."""
MOST_ROTATED = 24
SIZES = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
UPDATED = (1 << 12, 1 << 18, 1 << 21)

LINEAR = (  # rows, inputs, outputs
    (16, 64, 64),
    (128, 128, 128),
    (128, 512, 512),
    (512, 256, 64),
    (512, 64, 256),
    (512, 256, 256),
    (512, 1024, 256),
    (2048, 128, 128),
    (2048, 256, 1024),
    (2048, 1024, 256),
    (4096, 256, 256),
    (1024, 1024, 1024),
    (64, 1024, 1024),
)
CONVOLUTION = (  # samples, channels in, channels out, side of the image, side of the kernel
    (2, 8, 8, 14, 3),
    (4, 1, 24, 28, 3),
    (24, 1, 24, 28, 3),
    (4, 24, 24, 28, 3),
    (24, 24, 24, 28, 3),
    (8, 64, 64, 28, 3),
    (24, 48, 48, 14, 3),
    (4, 128, 128, 14, 3),
    (24, 96, 96, 7, 3),
    (24, 256, 256, 7, 3),
    (24, 48, 96, 14, 1),
    (8, 256, 64, 14, 1),
)
ATTENTION = (  # samples, heads, positions, width of a head
    (1, 4, 32, 8),
    (1, 8, 128, 32),
    (12, 8, 128, 32),
    (12, 8, 64, 32),
    (12, 4, 128, 32),
    (2, 8, 256, 64),
    (2, 8, 512, 64),
    (24, 4, 32, 8),
)

WIDTH, CHANNELS, SIDE = 256, 32, 8
"""Of the tensors that are passed over: features of a row, channels and side of an image."""


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One operator at one shape, to be timed forward and backward."""

    kind: str
    shape: tuple[int, ...]
    """(count, rows, columns, inner) of a product; (elements,) of a pass over memory."""
    make: Callable[[], tuple[Tensor, ...]]
    call: Callable[..., Tensor]


def cases() -> Iterator[OperatorCase]:
    """Everything that is timed but the optimiser."""
    for m, k, n in LINEAR:
        yield OperatorCase("linear", (1, m, n, k), partial(_linear, m, k, n), F.linear)
    for samples, channels, out, side, kernel in CONVOLUTION:
        shape = (1, samples * side * side, out, channels * kernel * kernel)
        make = partial(_image, samples, channels, out, side, kernel)
        yield OperatorCase("convolution", shape, make, partial(F.conv2d, padding=kernel // 2))
    for samples, heads, length, width in ATTENTION:
        shape = (samples * heads, length, length, width)
        yield OperatorCase("attention", shape, partial(_heads, samples, heads, length, width), _attend)
    for elements in SIZES:
        yield from _passes(elements)


def _passes(elements: int) -> Iterator[OperatorCase]:
    rows = elements // WIDTH
    samples = max(1, elements // (CHANNELS * SIDE * SIDE))
    pixels = samples * CHANNELS * SIDE * SIDE
    flat = partial(_input, rows, WIDTH)
    image = partial(_input, samples, CHANNELS, SIDE, SIDE)
    targets, words = torch.zeros(rows, dtype=torch.long), torch.arange(rows) % WIDTH
    yield OperatorCase("add", (elements,), lambda: (flat(), flat()), torch.add)
    yield OperatorCase("relu", (elements,), lambda: (flat(),), F.relu)
    yield OperatorCase("gelu", (elements,), lambda: (flat(),), partial(F.gelu, approximate="tanh"))
    yield OperatorCase("copy", (2 * elements,), lambda: (flat(), flat()), lambda x, y: torch.cat((x, y)))
    yield OperatorCase(
        "layer norm",
        (elements,),
        lambda: (flat(), _weight(WIDTH), _weight(WIDTH)),
        lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b),
    )
    yield OperatorCase(
        "batch norm",
        (pixels,),
        lambda: (image(), _weight(CHANNELS), _weight(CHANNELS)),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    )
    yield OperatorCase("pooling", (pixels,), lambda: (image(),), lambda x: F.max_pool2d(x, 2))
    yield OperatorCase("loss", (elements,), lambda: (flat(),), lambda x: F.cross_entropy(x, targets, reduction="sum"))
    yield OperatorCase(
        "embedding", (elements,), lambda: (_weight(WIDTH, WIDTH),), lambda table: F.embedding(words, table)
    )


def _linear(rows: int, inputs: int, outputs: int) -> tuple[Tensor, ...]:
    return _input(rows, inputs), _weight(outputs, inputs), _weight(outputs)


def _image(samples: int, channels: int, out: int, side: int, kernel: int) -> tuple[Tensor, ...]:
    return _input(samples, channels, side, side), _weight(out, channels, kernel, kernel), _weight(out)


def _heads(samples: int, heads: int, length: int, width: int) -> tuple[Tensor, ...]:
    """As projections give them: heads side by side within a position."""
    return tuple(torch.randn(samples, length, heads, width).transpose(1, 2).requires_grad_() for _ in range(3))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _input(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def _weight(*shape: int) -> Tensor:
    return (0.02 * torch.randn(shape)).requires_grad_()


def measure_operators(
    *, rounds: int, meet: Callable[[], None], said: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """On every rank: rows of (kind, shape, forward and backward seconds by round). `meet` is a barrier of all ranks."""
    todo = list(cases())
    rows: list[dict[str, Any]] = [
        {"kind": case.kind, "shape": list(case.shape), "forward_s": [], "backward_s": []} for case in todo
    ]
    updates: list[dict[str, Any]] = [
        {"kind": name, "shape": [size], "forward_s": [], "backward_s": []} for name in OPTIMISERS for size in UPDATED
    ]
    for turn in range(rounds + 1):
        for number, (case, row) in enumerate(zip(todo, rows, strict=True)):
            meet()
            forward_s, backward_s = _timed(case)
            if turn:
                row["forward_s"].append(forward_s)
                row["backward_s"].append(backward_s)
            said(turn * len(todo) + number + 1, (rounds + 1) * len(todo))
        for row in updates:
            meet()
            seconds = _update_s(OPTIMISERS[row["kind"]], row["shape"][0])
            if turn:
                row["forward_s"].append(seconds)
                row["backward_s"].append(0.0)
    return rows + updates


def _timed(case: OperatorCase) -> tuple[float, float]:
    """Seconds of one forward and one backward, of several inputs one after the other."""
    first = case.make()
    size = 4 * sum(each.numel() for each in first)
    inputs = [first, *(case.make() for _ in range(max(1, min(MOST_ROTATED, ROTATED_BYTES // size)) - 1))]
    start_s = time.perf_counter()
    outputs = [case.call(*each) for each in inputs]
    middle_s = time.perf_counter()
    gradients = [torch.ones_like(output) for output in outputs]
    again_s = time.perf_counter()
    # One walk back through all of them: starting a walk costs as much as several small operators.
    torch.autograd.grad(outputs, [tensor for each in inputs for tensor in each], gradients)
    stop_s = time.perf_counter()
    return (middle_s - start_s) / len(inputs), (stop_s - again_s) / len(inputs)


OPTIMISERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True),
}


def _update_s(factory: Callable[[list[Tensor]], torch.optim.Optimizer], size: int) -> float:
    piece = min(size, 1 << 18)
    params = [_weight(piece) for _ in range(size // piece)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = factory(params)
    optimizer.step()
    start_s = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start_s


COPIED_BYTES = 32 << 20


def measure_bandwidth(*, rounds: int, meet: Callable[[], None]) -> list[float]:
    """On every rank: seconds a byte of a long copy, read and written."""
    source, target = torch.ones(COPIED_BYTES // 4), torch.zeros(COPIED_BYTES // 4)
    found = []
    for _ in range(max(3, rounds)):
        meet()
        start_s = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        found.append((time.perf_counter() - start_s) / (4 * 2 * COPIED_BYTES))
    return found
