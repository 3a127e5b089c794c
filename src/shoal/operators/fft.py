"""Convolution as a product of spectra (Mathieu et al. 2014).

The transform has the size of the padded image: what wraps around falls outside the result. All positions are computed,
also those that a stride skips, so large kernels with stride 1 gain most. Real images: half of the spectrum is enough.
"""

from __future__ import annotations

import torch

from shoal.operators.window import Window


def fft(x: torch.Tensor, weight: torch.Tensor, window: Window) -> torch.Tensor:
    """x (N, C, H, W), weight (O, C / groups, Ky, Kx) -> (N, O, H', W')."""
    out_channels = len(weight)
    groups = window.groups
    height, width = window.output(x.shape[2:], weight.shape[2:])
    x = window.padded(x)
    plane = (x.shape[-2], x.shape[-1])
    images = torch.fft.rfft2(x).unflatten(1, (groups, -1))
    kernels = torch.fft.rfft2(_dilated(weight, window), s=plane).unflatten(0, (groups, -1))
    # The field's convolution is a correlation: the conjugate of the kernel's spectrum turns the kernel round. For each
    # group and frequency a product over channels: (N, C) by (C, O).
    left = images.permute(1, 3, 4, 0, 2)
    right = kernels.conj().permute(0, 3, 4, 2, 1)
    spectra = (left @ right).permute(3, 0, 4, 1, 2).reshape(len(x), out_channels, *images.shape[-2:])
    found = torch.fft.irfft2(spectra, s=plane)
    step = window.stride
    return found[..., : (height - 1) * step[0] + 1 : step[0], : (width - 1) * step[1] + 1 : step[1]].contiguous()


def _dilated(weight: torch.Tensor, window: Window) -> torch.Tensor:
    """The kernel with zeros between its elements."""
    if window.dilation == (1, 1):
        return weight
    rows, columns = ((side - 1) * by + 1 for side, by in zip(weight.shape[2:], window.dilation, strict=True))
    spread = weight.new_zeros(*weight.shape[:2], rows, columns)
    spread[..., :: window.dilation[0], :: window.dilation[1]] = weight
    return spread


def workspace(samples: int, x: torch.Tensor, weight: torch.Tensor, window: Window) -> int:
    """Elements of the spectra (two for a complex number; each is held twice while it is permuted) and of the planes."""
    rows, columns = (side + 2 * pad for side, pad in zip(x.shape[2:], window.padding, strict=True))
    half = 2 * rows * (columns // 2 + 1)
    channels = x.shape[1] + weight.shape[0]
    kernels = weight.shape[0] * weight.shape[1]
    return samples * channels * (2 * half + rows * columns) + 2 * half * kernels
