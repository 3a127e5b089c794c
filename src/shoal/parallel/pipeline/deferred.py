"""Weight gradients, put off: what a zero-bubble schedule fills its bubbles with.

Backward through a matrix product makes two products, the gradient of its input and that of its weight. Only the first
is needed by the stage before. During forward every product with a parameter is replaced by one that, in backward,
gives the gradient of its input at once and remembers how to make that of its weight; `run` makes them later. Small
parameters (norms, embeddings) are not worth it and get theirs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shoal.comm.ledger import BOOK
from shoal.job.gradient_hooks import hooks_of
from shoal.parallel.data import GradientReduction

Place = tuple[int, int]
"""(stage, micro-batch)"""


class DeferredWeights:
    """The products whose weight gradients are still to be made, by stage and micro-batch."""

    def __init__(self, reduction: GradientReduction) -> None:
        self.reduction = reduction
        self.waiting: dict[Place, list[Callable[[], None]]] = {}
        self._slots = {
            id(slot.param): (bucket, number, slot.name)
            for bucket in reduction.buckets
            for number, slot in enumerate(bucket.buffer.slots)
            if not hooks_of(slot.param)
        }

    @contextmanager
    def watching(self, place: Place) -> Iterator[None]:
        """Around a forward: its products with parameters put their weight gradients off."""
        with _Products(self, place):
            yield

    def knows(self, param: Any) -> bool:
        return isinstance(param, nn.Parameter) and param.requires_grad and id(param) in self._slots

    def later(self, place: Place, param: nn.Parameter, left: torch.Tensor, right: torch.Tensor) -> None:
        """The gradient of `param` is the product of the two, to be made in `run`."""
        bucket, number, name = self._slots[id(param)]

        def make() -> None:
            if left.dtype == right.dtype == param.dtype:
                bucket.receive_product(number, left, right)
            else:
                bucket.receive(number, (left.to(right.dtype) @ right).to(param.dtype))
            self.reduction.used.add(name)

        self.waiting.setdefault(place, []).append(make)

    def collect(self, backward: Callable[[], None], *, part: int) -> None:
        """A backward that makes gradients of inputs; nothing is reduced yet."""
        self.reduction.hold(part)
        with BOOK.during("backward"):
            backward()

    def run(self, place: Place, *, part: int, last: bool) -> None:
        """The weight gradients of one micro-batch; after the last one of a stage its buckets are reduced."""
        self.reduction.hold(part)
        with torch.no_grad():
            for make in self.waiting.pop(place, ()):
                make()
        if last:
            self.reduction.start(last_micro=True, part=part)
            with BOOK.during("backward"):
                self.reduction.flush()


class _Products(TorchFunctionMode):
    def __init__(self, deferred: DeferredWeights, place: Place) -> None:
        super().__init__()
        self.deferred, self.place = deferred, place

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _named(args, kwargs, "input", "weight", "bias")
            if self.deferred.knows(weight) and x.requires_grad:
                return _Linear.apply(x, bias, [weight], self, False)
        if func is torch.addmm and torch.is_grad_enabled() and not set(kwargs) - {"input", "mat1", "mat2"}:
            bias, x, weight = _named(args, kwargs, "input", "mat1", "mat2")
            if self.deferred.knows(weight) and x.requires_grad and weight.dim() == 2:
                return _Linear.apply(x, bias, [weight], self, True)
        return func(*args, **kwargs)


def _named(args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> list[Any]:
    found = list(args) + [None] * (len(names) - len(args))
    for at, name in enumerate(names):
        if name in kwargs:
            found[at] = kwargs[name]
    return found


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias (or x @ weight + bias, transposed), with the weight's gradient put off."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        holder: list[nn.Parameter],
        mode: _Products,
        transposed: bool,
    ) -> Any:
        # In a list, so that autograd expects no gradient for it.
        (weight,) = holder
        ctx.save_for_backward(x)
        ctx.weight, ctx.mode, ctx.transposed = weight, mode, transposed
        ctx.bias_shape = None if bias is None else bias.shape
        if transposed:
            return x @ weight if bias is None else torch.addmm(bias, x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, mode, transposed = ctx.weight, ctx.mode, ctx.transposed
        values = weight.detach().to(dy.dtype)
        dx = dy @ (values.t() if transposed else values)
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        left, right = (flat_x.t(), flat_dy) if transposed else (flat_dy.t(), flat_x)
        mode.deferred.later(mode.place, weight, left, right)
        shape = ctx.bias_shape
        db = dy.sum_to_size(shape) if shape is not None and ctx.needs_input_grad[1] else None
        return dx.to(x.dtype), db, None, None, None
