"""`convolve`: a 2-D convolution by a named method, at once or in parts of the batch that fit a memory bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shoal.operators import direct as direct_
from shoal.operators import fft as fft_
from shoal.operators import im2col as im2col_
from shoal.operators import winograd as winograd_
from shoal.operators.window import CannotConvolve, Pair, Window, window_for

__all__ = ["METHODS", "CannotConvolve", "applies", "convolve", "workspace_bytes"]

Method = Callable[[torch.Tensor, torch.Tensor, Window], torch.Tensor]


def _library(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    return F.conv2d(x, weight, None, window.stride, window.padding, window.dilation, window.groups)


METHODS: dict[str, Method] = {
    "library": _library,
    "direct": direct_.direct,
    "im2col": im2col_.im2col,
    "fft": fft_.fft,
    "winograd": winograd_.winograd,
}
"""By name. `library` is PyTorch's own."""

_WORKSPACES = {
    "direct": direct_.workspace,
    "im2col": im2col_.workspace,
    "fft": fft_.workspace,
    "winograd": winograd_.workspace,
}


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    method: str = "library",
    most_bytes: int | None = None,
) -> torch.Tensor:
    """A 2-D convolution, equal to `torch.nn.functional.conv2d`.

    Args:
        x: Images (N, C, H, W).
        weight: Kernels (O, C / groups, Ky, Kx).
        bias: One number for each output channel, or None.
        stride, padding, dilation, groups: As in `conv2d`, in numbers.
        method: One of `METHODS`.
        most_bytes: Bound for the temporaries, in forward and in backward. The batch is processed in the fewest parts
            that keep it; in backward each part's temporaries are computed again.

    Returns:
        The images (N, O, H', W').

    Raises:
        CannotConvolve: The shapes do not fit, the method does not apply, or one sample exceeds the bound.

    Example:
        y = convolve(x, weight, padding=1, method="fft", most_bytes=64 << 20)
    """
    window = window_for(x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
    if method not in METHODS:
        raise CannotConvolve(f"method={method!r}: expected one of {', '.join(METHODS)}")
    parts = 1 if most_bytes is None else _num_parts(x, weight, window, method=method, most_bytes=most_bytes)
    if not len(x):
        found = _library(x, weight, window)  # Not every library transforms nothing.
    elif parts == 1:
        found = METHODS[method](x, weight, window)
    else:
        found = _InParts.apply(x, weight, window, METHODS[method], parts)
    return found if bias is None else found + bias[:, None, None]


def applies(method: str, weight: torch.Tensor, window: Window) -> bool:
    """Whether a method can compute this convolution."""
    return method != "winograd" or not winograd_.why_not(weight, window)


def workspace_bytes(method: str, samples: int, x: torch.Tensor, weight: torch.Tensor, window: Window) -> int:
    """Bytes of the temporaries of a forward on `samples` samples shaped like those of x."""
    return _WORKSPACES[method](samples, x, weight, window) * x.element_size()


def _num_parts(x: torch.Tensor, weight: torch.Tensor, window: Window, *, method: str, most_bytes: int) -> int:
    if method == "library":
        raise CannotConvolve("most_bytes= bounds temporaries of Shoal's own methods; PyTorch's are not known. Name one")
    if not applies(method, weight, window):
        raise CannotConvolve(f"method='winograd': {winograd_.why_not(weight, window)}")
    samples = len(x)
    while samples > 1 and workspace_bytes(method, samples, x, weight, window) > most_bytes:
        samples -= 1
    needed = workspace_bytes(method, samples, x, weight, window)
    if needed > most_bytes and len(x):
        raise CannotConvolve(
            f"most_bytes={most_bytes:,}: method={method!r} needs {needed:,} bytes for one sample; allow as many, or "
            "use method='direct'"
        )
    return max(1, -(-len(x) // max(1, samples)))


class _InParts(torch.autograd.Function):
    """A method applied to parts of the batch, one after the other. Only the inputs are kept for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, window: Window, method: Method, parts: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.window, ctx.method, ctx.parts = window, method, parts
        found = None
        for place in _places(len(x), parts):
            each = method(x[place], weight, window)
            found = each.new_empty(len(x), *each.shape[1:]) if found is None else found
            found[place] = each
        assert found is not None, parts
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for place in _places(len(x), ctx.parts):
            with torch.enable_grad():
                images = x[place].detach().requires_grad_(grad_x is not None)
                kernels = weight.detach().requires_grad_(grad_weight is not None)
                found = ctx.method(images, kernels, ctx.window)
            wanted = [each for each in (images, kernels) if each.requires_grad]
            given = list(torch.autograd.grad(found, wanted, grad[place]))
            if grad_x is not None:
                grad_x[place] = given.pop(0)
            if grad_weight is not None:
                grad_weight += given.pop(0)
        return grad_x, grad_weight, None, None, None


def _places(samples: int, parts: int) -> list[slice]:
    """Parts that differ by at most one sample."""
    ends = [samples * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends) if start < stop]
