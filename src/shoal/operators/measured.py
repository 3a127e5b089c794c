"""The fastest method for each convolution of a model, by measurement on this machine.

The choice is made once and then fixed: a model that chose again while it trains would round differently from run to
run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.operators.convolve import METHODS, applies, convolve
from shoal.operators.window import Window, pair

Model = TypeVar("Model", bound=nn.Module)

MARGIN = 0.95
"""A method replaces PyTorch's if it takes at most this fraction of its time: smaller gains are noise."""
WARM_UP, ROUNDS = 1, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one forward and backward of a convolution by each method that applies."""

    seconds: dict[str, float]

    @property
    def best(self) -> str:
        """The fastest; PyTorch's unless another is clearly faster."""
        name = min(self.seconds, key=lambda each: self.seconds[each])
        library = self.seconds["library"]
        return name if self.seconds[name] <= MARGIN * library else "library"


class ConvolutionBy(nn.Conv2d):
    """An `nn.Conv2d` that is computed by a named method. Same parameters, names and results."""

    method: str = "library"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return convolve(
            input,
            self.weight,
            self.bias,
            stride=_two(self.stride),
            padding=_two(self.padding),
            dilation=_two(self.dilation),
            groups=self.groups,
            method=self.method,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, method={self.method}"


def fastest(model: Model, *inputs: Any, progress: Callable[[str], None] | None = None) -> Model:
    """Replaces convolutions of a model by the method that is fastest here, where it beats PyTorch's.

    Args:
        model: A module, changed in place; parameters are kept. An `nn.Conv2d` itself is allowed.
        inputs: What one forward takes; shapes and batch are those that training will use.
        progress: Is given each layer and its choice.

    Returns:
        The model.

    Example:
        model = shoal.operators.fastest(model, images[:32])
    """
    shapes = _input_shapes(model, inputs)
    known: dict[tuple[Any, ...], str] = {}
    for path, conv in list(_convolutions(model)):
        if path not in shapes:
            continue
        of = conv.weight
        key = (shapes[path], of.shape, of.dtype, conv.stride, conv.padding, conv.dilation, conv.groups)
        if key not in known:
            known[key] = time_methods(conv, shapes[path]).best
        if progress is not None:
            progress(f"{path or type(conv).__name__}: {known[key]}")
        if known[key] != "library":
            # Not another module in its place: it may be shared, hooked or referred to elsewhere.
            conv.__class__ = ConvolutionBy
            conv.method = known[key]  # type: ignore[assignment]
    return model


def time_methods(conv: nn.Conv2d, shape: torch.Size | tuple[int, ...], *, rounds: int = ROUNDS) -> Timing:
    """Times forward and backward of a convolution on images of this shape, methods interleaved, median of rounds."""
    weight = conv.weight.detach().requires_grad_()
    x = torch.randn(shape, dtype=weight.dtype, device=weight.device).requires_grad_()
    window = Window(
        stride=_two(conv.stride), padding=_two(conv.padding), dilation=_two(conv.dilation), groups=conv.groups
    )
    names = [name for name in METHODS if applies(name, weight, window)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    grad = None
    for number in range(WARM_UP + rounds):
        for name in names:
            start = _now(weight.device)
            found = METHODS[name](x, weight, window)
            grad = torch.randn_like(found) if grad is None else grad
            torch.autograd.grad(found, (x, weight), grad)
            if number >= WARM_UP:
                seconds[name].append(_now(weight.device) - start)
    return Timing(seconds={name: statistics.median(each) for name, each in seconds.items()})


def _now(device: torch.device) -> float:
    """The time, once the device has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def _convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    """Those whose padding is zeros, in numbers. Other subclasses may compute something else."""
    for path, module in model.named_modules():
        plain = type(module) in (nn.Conv2d, ConvolutionBy)
        if plain and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            yield path, module  # type: ignore[misc]


def _input_shapes(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, torch.Size]:
    """The shape of the images that each convolution sees in one forward."""
    found: dict[str, torch.Size] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            if given and isinstance(given[0], torch.Tensor) and given[0].dim() == 4:
                found.setdefault(path, given[0].shape)

        return hook

    hooks = [conv.register_forward_pre_hook(note(path)) for path, conv in _convolutions(model)]
    mode = model.training
    try:
        with torch.no_grad():
            model.eval()(*inputs)  # So that no buffer or random number is changed by the look.
    finally:
        model.train(mode)
        for hook in hooks:
            hook.remove()
    return found


def _two(value: Any) -> tuple[int, int]:
    return pair(value if isinstance(value, int) else tuple(value), "window")
