"""The window of a 2-D convolution, and the checks that all methods share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

Pair = tuple[int, int]


class CannotConvolve(ValueError):
    """The arguments do not fit together, or a method does not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """How a kernel moves over an image."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """The image with its border of zeros."""
        rows, columns = self.padding
        return F.pad(x, (columns, columns, rows, rows)) if rows or columns else x

    def output(self, image: Pair, kernel: Pair) -> Pair:
        """Height and width of the result; `image` is without padding."""
        rows, columns = (
            (side + 2 * pad - dilated * (window - 1) - 1) // step + 1
            for side, window, step, pad, dilated in zip(
                image, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return rows, columns


def pair(value: int | Pair, name: str) -> Pair:
    """Two numbers from one or two."""
    found = (value, value) if isinstance(value, int) else tuple(value)
    if len(found) != 2 or not all(isinstance(each, int) for each in found):
        raise CannotConvolve(f"{name}={value!r}: expected an integer or two")
    return found


def window_for(
    x: torch.Tensor, weight: torch.Tensor, *, stride: int | Pair, padding: int | Pair, dilation: int | Pair, groups: int
) -> Window:
    """The window, checked against the image and the kernel."""
    if x.dim() != 4 or weight.dim() != 4:
        raise CannotConvolve(
            f"an image of shape {tuple(x.shape)} and a kernel of shape {tuple(weight.shape)}: expected "
            "(samples, channels, height, width) and (out channels, in channels / groups, height, width)"
        )
    found = Window(
        stride=pair(stride, "stride"),
        padding=pair(padding, "padding"),
        dilation=pair(dilation, "dilation"),
        groups=groups,
    )
    if groups < 1 or weight.shape[0] % groups or x.shape[1] != weight.shape[1] * groups:
        raise CannotConvolve(
            f"{x.shape[1]} input channels in {groups} groups do not fit a kernel of shape {tuple(weight.shape)}"
        )
    if min(found.stride) < 1 or min(found.dilation) < 1 or min(found.padding) < 0:
        raise CannotConvolve(f"{found}: stride and dilation are at least 1, padding at least 0")
    if min(found.output(x.shape[2:], weight.shape[2:])) < 1:
        raise CannotConvolve(
            f"a kernel of {tuple(weight.shape[2:])} with dilation {found.dilation} is larger than the padded image "
            f"{tuple(x.shape[2:])} + 2 * {found.padding}"
        )
    return found
