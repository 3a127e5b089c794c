"""The four convolutions, computed step by step in NumPy, with a meter that counts what is done: multiply-adds, and
rounds of operations that wait for each other (a sum of n numbers is added up in pairs).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass
class Meter:
    """Work of everything; depth of phases that follow each other."""

    work: int = 0
    depth: int = 0

    def product(self, left: np.ndarray, right: np.ndarray, *, times: int = 1) -> np.ndarray:
        """Matrices multiplied, `times` of them side by side in the leading dimensions."""
        self.work += times * left.shape[-2] * left.shape[-1] * right.shape[-1]
        return left @ right


def rounds(count: int) -> int:
    """Rounds in which so many numbers are added up in pairs."""
    taken = 0
    while count > 1:
        count, taken = count - count // 2, taken + 1
    return taken


def padded(x: np.ndarray, padding: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))


def direct(x: np.ndarray, w: np.ndarray, *, padding: int, stride: int = 1) -> tuple[np.ndarray, Meter]:
    """Number by number."""
    meter, x = Meter(), padded(x, padding)
    kernel = w.shape[-1]
    side = (x.shape[-1] - kernel) // stride + 1
    out = np.zeros((x.shape[0], w.shape[0], side, side))
    for n, o, row, column in np.ndindex(*out.shape):
        for c, dy, dx in np.ndindex(*w.shape[1:]):
            out[n, o, row, column] += x[n, c, row * stride + dy, column * stride + dx] * w[o, c, dy, dx]
            meter.work += 1
    meter.depth = rounds(w.shape[1]) + 2 * rounds(kernel)
    return out, meter


def im2col(x: np.ndarray, w: np.ndarray, *, padding: int, stride: int = 1) -> tuple[np.ndarray, Meter]:
    """One product with the matrix of all windows."""
    meter, x = Meter(), padded(x, padding)
    kernel = w.shape[-1]
    side = (x.shape[-1] - kernel) // stride + 1
    columns = np.stack(
        [
            x[:, :, row * stride : row * stride + kernel, column * stride : column * stride + kernel].reshape(
                len(x), -1
            )
            for row in range(side)
            for column in range(side)
        ],
        axis=-1,
    )
    flat = columns.transpose(1, 0, 2).reshape(columns.shape[1], -1)
    out = meter.product(w.reshape(len(w), -1), flat)
    meter.depth = rounds(w.shape[1]) + 2 * rounds(kernel)
    return out.reshape(len(w), len(x), side, side).transpose(1, 0, 2, 3), meter


def fft(x: np.ndarray, w: np.ndarray, *, padding: int, stride: int = 1) -> tuple[np.ndarray, Meter]:
    """By spectra of the padded image's size, which must be a power of two here."""
    meter, x = Meter(), padded(x, padding)
    side, kernel = x.shape[-1], w.shape[-1]
    kernels = np.zeros((*w.shape[:2], side, side), dtype=complex)
    # Turned round, since the field's convolution is a correlation.
    kernels[:, :, :kernel, :kernel] = w[:, :, ::-1, ::-1]
    images, stages = plane_transform(x.astype(complex), meter)
    kernels, _ = plane_transform(kernels, meter)
    spectra = meter.product(images.transpose(2, 3, 0, 1), kernels.transpose(2, 3, 1, 0), times=side * side).transpose(
        2, 3, 0, 1
    )
    out, _ = plane_transform(spectra, meter, inverse=True)
    meter.depth = 2 * stages + rounds(w.shape[1])
    # What lies before kernel - 1 has wrapped around.
    return out.real[:, :, kernel - 1 :: stride, kernel - 1 :: stride], meter


def plane_transform(planes: np.ndarray, meter: Meter, *, inverse: bool = False) -> tuple[np.ndarray, int]:
    rows, first = transform(planes, meter, inverse=inverse)
    columns, second = transform(rows.swapaxes(-1, -2), meter, inverse=inverse)
    return columns.swapaxes(-1, -2) / (planes.shape[-1] * planes.shape[-2] if inverse else 1), first + second


def transform(x: np.ndarray, meter: Meter, *, inverse: bool) -> tuple[np.ndarray, int]:
    """Radix 2 along the last dimension; also how many stages of butterflies follow each other."""
    length = x.shape[-1]
    if length == 1:
        return x, 0
    even, stages = transform(x[..., ::2], meter, inverse=inverse)
    odd, _ = transform(x[..., 1::2], meter, inverse=inverse)
    turn = np.exp((2j if inverse else -2j) * np.pi * np.arange(length // 2) / length)
    meter.work += 2 * odd.size  # even + turn * odd, even - turn * odd
    return np.concatenate([even + turn * odd, even - turn * odd], axis=-1), stages + 1


def winograd(x: np.ndarray, w: np.ndarray, *, padding: int, tile: int) -> tuple[np.ndarray, Meter]:
    """F(tile, kernel) on tiles of the output; images are filled up to whole tiles."""
    meter = Meter()
    kernel = w.shape[-1]
    alpha = tile + kernel - 1
    side = x.shape[-1] + 2 * padding - kernel + 1
    across = -(-side // tile)
    x = padded(x, padding)
    x = np.pad(x, ((0, 0), (0, 0), (0, across * tile - side), (0, across * tile - side)))
    out_matrix, kernel_matrix, data_matrix = cook_toom(tile, kernel)
    samples, inputs, outputs = x.shape[0], x.shape[1], w.shape[0]
    kernels = meter.product(kernel_matrix, w, times=outputs * inputs)
    kernels = meter.product(kernels, kernel_matrix.T, times=outputs * inputs)
    tiles = np.stack(
        [
            x[:, :, row * tile : row * tile + alpha, column * tile : column * tile + alpha]
            for row in range(across)
            for column in range(across)
        ],
        axis=2,
    )
    count = samples * across * across
    data = meter.product(data_matrix, tiles, times=inputs * count)
    data = meter.product(data, data_matrix.T, times=inputs * count)
    left = kernels.transpose(2, 3, 0, 1)
    right = data.transpose(3, 4, 1, 0, 2).reshape(alpha, alpha, inputs, count)
    mixed = meter.product(left, right, times=alpha * alpha)
    mixed = mixed.reshape(alpha, alpha, outputs, samples, -1).transpose(3, 2, 4, 0, 1)
    found = meter.product(out_matrix, mixed, times=outputs * count)
    found = meter.product(found, out_matrix.T, times=outputs * count)
    out = found.reshape(samples, outputs, across, across, tile, tile).transpose(0, 1, 2, 4, 3, 5)
    meter.depth = 2 * rounds(kernel) + 4 * rounds(alpha) + rounds(inputs)
    return out.reshape(samples, outputs, across * tile, across * tile)[:, :, :side, :side], meter


def cook_toom(tile: int, kernel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three matrices of F(tile, kernel), from points 0, 1, -1, 2, -2, ... and infinity."""
    alpha = tile + kernel - 1
    points = [Fraction(0), *(Fraction(sign * size) for size in range(1, alpha) for sign in (1, -1))][: alpha - 1]
    last = [0] * (tile - 1) + [1]
    out_rows = [[*(point**power for point in points), last[power]] for power in range(tile)]
    kernel_rows, data_rows = [], []
    for point in points:
        others = [other for other in points if other != point]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        kernel_rows.append([point**power / scale for power in range(kernel)])
        data_rows.append([*polynomial(others), Fraction(0)])
    kernel_rows.append([Fraction(0)] * (kernel - 1) + [Fraction(1)])
    data_rows.append(polynomial(points))
    matrices = [np.array(rows, dtype=float) for rows in (out_rows, kernel_rows, data_rows)]
    return matrices[0], matrices[1], matrices[2]


def polynomial(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients, lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *found], [*(-root * each for each in found), Fraction(0)]
        found = [one + two for one, two in zip(shifted, scaled, strict=True)]
    return found
