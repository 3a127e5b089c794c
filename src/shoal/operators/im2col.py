"""Convolution as one matrix product: every window of the image is written out as a column first.

The same work as the direct method; the columns take Ky * Kx times the memory of the image.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shoal.operators.window import Window


def im2col(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """x (N, C, H, W), weight (O, C / groups, Ky, Kx) -> (N, O, H', W')."""
    out_channels = len(weight)
    height, width = window.output(x.shape[2:], weight.shape[2:])
    if weight.shape[2:] == (1, 1):
        # A window of one element is its own column.
        columns = window.padded(x)[..., :: window.stride[0], :: window.stride[1]].flatten(2)
    else:
        columns = F.unfold(x, weight.shape[2:], dilation=window.dilation, padding=window.padding, stride=window.stride)
    columns = columns.unflatten(1, (window.groups, -1))
    matrices = weight.reshape(window.groups, out_channels // window.groups, -1)
    return (matrices @ columns).reshape(len(x), out_channels, height, width)


def workspace(samples: int, x: torch.Tensor, weight: torch.Tensor, window: Window) -> int:
    """Elements of the columns and of the result."""
    height, width = window.output(x.shape[2:], weight.shape[2:])
    taps = weight.shape[2] * weight.shape[3]
    return samples * height * width * (x.shape[1] * taps + weight.shape[0])
