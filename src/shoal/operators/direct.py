"""Direct convolution: for each element of the kernel one product over channels, added to the result.

No temporary is larger than the result. Work: N * Cout * H' * W' * Cin / groups * Ky * Kx multiply-adds.
"""

from __future__ import annotations

import torch

from shoal.operators.window import Window


def direct(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """x (N, C, H, W), weight (O, C / groups, Ky, Kx) -> (N, O, H', W')."""
    samples, groups = len(x), window.groups
    out_channels, group_channels, *kernel = weight.shape
    height, width = window.output(x.shape[2:], (kernel[0], kernel[1]))
    x = window.padded(x).unflatten(1, (groups, group_channels))
    weight = weight.unflatten(0, (groups, out_channels // groups))
    found = x.new_zeros(samples, groups, out_channels // groups, height * width)
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            top, left = row * window.dilation[0], column * window.dilation[1]
            seen = x[
                ...,
                top : top + (height - 1) * window.stride[0] + 1 : window.stride[0],
                left : left + (width - 1) * window.stride[1] + 1 : window.stride[1],
            ]
            found = found + weight[..., row, column] @ seen.flatten(3)
    return found.reshape(samples, out_channels, height, width)


def workspace(samples: int, x: torch.Tensor, weight: torch.Tensor, window: Window) -> int:
    """Elements of temporaries: the padded image, one shifted copy of it, and a partial result."""
    height, width = window.output(x.shape[2:], weight.shape[2:])
    padded = window_elements(x, window)
    return samples * (padded + x.shape[1] * height * width + weight.shape[0] * height * width)


def window_elements(x: torch.Tensor, window: Window) -> int:
    """Elements of one padded sample."""
    rows, columns = (side + 2 * pad for side, pad in zip(x.shape[2:], window.padding, strict=True))
    return int(x.shape[1] * rows * columns)
