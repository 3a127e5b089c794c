"""Convolution, and the four ways to compute it: direct, im2col, FFT and Winograd's F(m, r).

All four give the same numbers; they differ in work and depth, so which is best depends on the layer. Formulas: Ben-Nun
& Hoefler 2019, section 5; Mathieu et al. 2014 (FFT); Lavin & Gray 2016 (Winograd). The FFT's operations are those of
complex numbers; to compare them with the others, `real_work` counts what they are in real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, prod
from typing import ClassVar

from shoal.analysis.operator import Cost, Operator, Sides, log2_ceil, moved_bytes

FFT_CONSTANT = 1.0
"""Operations of a transform of n points are this times n log2 n: a butterfly has two complex multiply-adds, and a
radix-2 transform n/2 log2 n butterflies."""

REAL_PER_COMPLEX = 2
"""A complex multiply-add is four real ones, but half of a real image's spectrum determines the rest."""

WINOGRAD_TILES = (2, 4)
"""Sides m of the output tiles that libraries use."""

LARGEST_ALPHA = 8
"""Side of the input tiles, m + r - 1. The transforms of larger ones lose too many digits in single precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution(Operator):
    """Of images with any number of dimensions; `image` is that of the input, without padding."""

    kind: ClassVar[str] = "convolution"

    samples: int
    in_channels: int
    out_channels: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = True

    @property
    def output(self) -> tuple[int, ...]:
        sides = zip(self.padded, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((side - dilated * (window - 1) - 1) // step + 1 for side, window, step, dilated in sides)

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(side + 2 * pad for side, pad in zip(self.image, self.padding, strict=True))

    @property
    def parameters(self) -> int:
        return self._weights + (self.out_channels if self.bias else 0)

    @property
    def shape(self) -> str:
        window, image = ("x".join(str(side) for side in sides) for sides in (self.kernel, self.image))
        step = f" / {self.stride[0]}" if max(self.stride) > 1 else ""
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        return f"{window}{step}, {self.in_channels:,} -> {self.out_channels:,}{groups} on {self.samples:,} x {image}"

    @property
    def _weights(self) -> int:
        return self.out_channels * self.group_channels * prod(self.kernel)

    @property
    def group_channels(self) -> int:
        """Input channels that meet in one output."""
        return self.in_channels // self.groups

    @property
    def sides(self) -> Sides:
        """Every place of the output by every number of a window."""
        return Sides(
            count=self.groups,
            rows=self.samples * prod(self.output),
            columns=self.out_channels // self.groups,
            inner=self.group_channels * prod(self.kernel),
        )

    @property
    def _elements(self) -> tuple[int, int]:
        read = self.samples * self.in_channels * prod(self.image)
        return read, self.samples * self.out_channels * prod(self.output)

    def forward(self) -> Cost:
        return direct(self)

    def input_gradient(self) -> Cost:
        """A convolution with the kernels turned round: sums run over the output's channels."""
        depth = log2_ceil(self.out_channels // self.groups) + sum(log2_ceil(side) for side in self.kernel)
        read, written = self._elements
        return Cost(direct(self).work, depth, moved_bytes(written, self._weights, read))

    def weight_gradient(self) -> Cost:
        """Sums run over samples and over the output's image."""
        depth = log2_ceil(self.samples) + sum(log2_ceil(side) for side in self.output)
        read, written = self._elements
        return Cost(direct(self).work, depth, moved_bytes(read, written, self._weights))


@dataclass(frozen=True, kw_only=True, slots=True)
class TransposedConvolution(Operator):
    """The way back through a convolution: its forward is the other's gradient of the input, and the other way round."""

    kind: ClassVar[str] = "transposed convolution"

    back_through: Convolution
    bias: bool = True

    @property
    def parameters(self) -> int:
        return self.back_through._weights + (self.back_through.in_channels if self.bias else 0)

    @property
    def shape(self) -> str:
        return f"back through {self.back_through.shape}"

    @property
    def sides(self) -> Sides:
        return self.back_through.sides

    def forward(self) -> Cost:
        return self.back_through.input_gradient()

    def input_gradient(self) -> Cost:
        return self.back_through.forward()

    def weight_gradient(self) -> Cost:
        return self.back_through.weight_gradient()


def direct(layer: Convolution) -> Cost:
    """Seven nested loops."""
    depth = log2_ceil(layer.group_channels) + sum(log2_ceil(side) for side in layer.kernel)
    read, written = layer._elements
    return Cost(layer.sides.work, depth, moved_bytes(read, layer._weights, written))


def im2col(layer: Convolution) -> Cost:
    """One matrix product, after every window was written out as a column: the same work, more bytes."""
    columns = layer.samples * prod(layer.output) * layer.in_channels * prod(layer.kernel)
    plain = direct(layer)
    return Cost(plain.work, plain.depth, plain.bytes + moved_bytes(2 * columns))


def fft(layer: Convolution) -> Cost:
    """Transforms of images and kernels, a product for every frequency, and transforms back. The plane is the padded
    image: what wraps around falls outside the output. All positions are computed, also those that a stride skips.
    """
    plane = prod(layer.padded)
    images, results = layer.samples * layer.in_channels, layer.samples * layer.out_channels
    kernels = layer.out_channels * layer.group_channels
    transforms = ceil(FFT_CONSTANT * plane * log2(plane)) * (kernels + images + results)
    product = plane * layer.samples * kernels
    depth = 2 * log2_ceil(plane) + log2_ceil(layer.group_channels)
    read, written = layer._elements
    # Complex numbers are twice as large; the images' and results' spectra are written and read.
    spectra = 2 * plane * (kernels + images + results)
    return Cost(transforms + product, depth, moved_bytes(read, layer._weights, written, 2 * spectra))


def winograd(layer: Convolution, tile: int) -> Cost:
    """F(m, r) on tiles of m x m outputs, each from alpha x alpha inputs, alpha = m + r - 1 (Lavin & Gray 2016)."""
    why_not = cannot_winograd(layer)
    if why_not:
        raise ValueError(f"Winograd's algorithm cannot compute {layer.shape}: {why_not}")
    window = layer.kernel[0]
    alpha = tile + window - 1
    tiles = layer.samples * prod(-(-side // tile) for side in layer.output)
    kernels = layer.out_channels * layer.group_channels
    work = (
        kernels * (alpha * window**2 + alpha**2 * window)
        + layer.in_channels * tiles * 2 * alpha**3
        + alpha**2 * kernels * tiles
        + layer.out_channels * tiles * (alpha**2 * tile + alpha * tile**2)
    )
    depth = 2 * log2_ceil(window) + 4 * log2_ceil(alpha) + log2_ceil(layer.group_channels)
    read, written = layer._elements
    transformed = alpha**2 * (kernels + layer.in_channels * tiles + layer.out_channels * tiles)
    return Cost(work, depth, moved_bytes(read, layer._weights, written, 2 * transformed))


def cannot_winograd(layer: Convolution) -> str:
    """Why F(m, r) does not apply; empty if it does."""
    if len(layer.kernel) != 2 or layer.kernel[0] != layer.kernel[1]:
        return "its kernel is not a square"
    if layer.kernel[0] == 1:
        return "a kernel of one number leaves nothing to save"
    if max(layer.stride) > 1:
        return f"its stride is {layer.stride[0]}, and tiles are made for stride 1"
    return "its kernel is dilated" if max(layer.dilation) > 1 else ""


def algorithms(layer: Convolution) -> dict[str, Cost]:
    """Every algorithm that is fit to compute the layer, with its cost; Winograd's by tile."""
    found = {"direct": direct(layer), "im2col": im2col(layer), "fft": fft(layer)}
    if not cannot_winograd(layer):
        for tile in (each for each in WINOGRAD_TILES if each + layer.kernel[0] - 1 <= LARGEST_ALPHA):
            found[f"winograd F({tile}, {layer.kernel[0]})"] = winograd(layer, tile)
    return found


def real_work(name: str, cost: Cost) -> int:
    """The work of an algorithm in multiply-adds of real numbers."""
    return cost.work * (REAL_PER_COMPLEX if name == "fft" else 1)


def best_by_work(layer: Convolution) -> str:
    """Among equals the one that moves fewer bytes."""
    found = algorithms(layer)
    return min(found, key=lambda name: (real_work(name, found[name]), found[name].bytes))


def best_by_depth(layer: Convolution) -> str:
    """Among equals the one with less work, then with fewer bytes."""
    found = algorithms(layer)
    return min(found, key=lambda name: (found[name].depth, real_work(name, found[name]), found[name].bytes))
