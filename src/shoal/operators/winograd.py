"""Winograd's minimal filtering F(m, r) (Lavin & Gray 2016): tiles of m x m results from tiles of alpha x alpha inputs.

alpha = m + r - 1. The product over channels takes alpha^2 multiply-adds for m^2 results instead of m^2 r^2. The price
is precision: the transforms of F(4, 3) lose about a digit in float32. Square kernels, stride 1, no dilation.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import torch
from torch.nn import functional as F

from shoal.analysis.convolution import LARGEST_ALPHA, WINOGRAD_TILES
from shoal.operators.window import CannotConvolve, Window

TILES = tuple(sorted(WINOGRAD_TILES, reverse=True))
"""Sides m of the tiles that are tried, largest first."""


def winograd(x: torch.Tensor, weight: torch.Tensor, window: Window, *, tile: int | None = None) -> torch.Tensor:
    """x (N, C, H, W), weight (O, C / groups, r, r) -> (N, O, H', W')."""
    reason = why_not(weight, window)
    if reason:
        raise CannotConvolve(f"method='winograd': {reason}")
    tile = tile_for(weight) if tile is None else tile
    samples, (out_channels, side), groups = len(x), (weight.shape[0], weight.shape[-1]), window.groups
    height, width = window.output(x.shape[2:], (side, side))
    down, across = -(-height // tile), -(-width // tile)
    for_results, for_kernels, for_data = (
        torch.tensor(rows, dtype=x.dtype, device=x.device) for rows in transforms(tile, side)
    )
    alpha = tile + side - 1
    x = window.padded(x)
    # Filled up to complete tiles.
    x = F.pad(x, (0, across * tile + side - 1 - x.shape[-1], 0, down * tile + side - 1 - x.shape[-2]))
    tiles = x.unfold(2, alpha, tile).unfold(3, alpha, tile)  # samples, channels, down, across, alpha, alpha
    tiles = tiles.unflatten(1, (groups, -1)).permute(5, 6, 1, 2, 0, 3, 4)
    kernels = weight.unflatten(0, (groups, -1)).permute(3, 4, 0, 1, 2)
    # For each group and each of alpha x alpha places: (out channels, channels) by (channels, tiles).
    mixed = _both_sides(for_kernels, kernels) @ _both_sides(for_data, tiles).flatten(4)
    found = _both_sides(for_results, mixed).unflatten(4, (samples, down, across))
    found = found.permute(4, 2, 3, 5, 0, 6, 1).reshape(samples, out_channels, down * tile, across * tile)
    return found[..., :height, :width].contiguous()


def _both_sides(matrix: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """matrix @ tile @ matrix.T for tiles whose rows and columns are the first two dimensions, in two large products."""
    rows, columns, *rest = tiles.shape
    half = (matrix @ tiles.reshape(rows, -1)).view(len(matrix), columns, -1)
    return (matrix @ half).view(len(matrix), len(matrix), *rest)


def why_not(weight: torch.Tensor, window: Window) -> str:
    """Why it does not apply; empty if it does."""
    rows, columns = weight.shape[2:]
    if rows != columns:
        return f"its tiles are square, and the kernel is {rows} x {columns}"
    if rows == 1:
        return "a kernel of one element leaves nothing to save"
    if max(window.stride) > 1:
        return f"its tiles are made for stride 1, and the stride is {window.stride}"
    if max(window.dilation) > 1:
        return f"its tiles are made for dense kernels, and the dilation is {window.dilation}"
    if min(TILES) + rows - 1 > LARGEST_ALPHA:
        return f"its transforms would lose too many digits for a kernel of {rows} x {rows}"
    return ""


def tile_for(weight: torch.Tensor) -> int:
    """The largest tile whose transforms keep enough digits."""
    return next(tile for tile in TILES if tile + weight.shape[-1] - 1 <= LARGEST_ALPHA)


def workspace(samples: int, x: torch.Tensor, weight: torch.Tensor, window: Window) -> int:
    """Elements of the transformed tiles, kernels and results; tiles and results are held twice while permuted."""
    side = weight.shape[-1]
    tile = tile_for(weight)
    alpha = tile + side - 1
    height, width = window.output(x.shape[2:], (side, side))
    tiles = samples * -(-height // tile) * -(-width // tile)
    channels = x.shape[1] + weight.shape[0]
    return 2 * alpha**2 * tiles * channels + 2 * alpha**2 * weight.shape[0] * weight.shape[1]


@lru_cache
def transforms(tile: int, side: int) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """The matrices of the results, the kernels and the data, by Cook and Toom's construction: polynomials are
    evaluated at the points 0, 1, -1, 2, -2, 1/2, -1/2, ... and infinity, multiplied there, and interpolated."""
    alpha = tile + side - 1
    points = _points(alpha - 1)
    last = [Fraction(0)] * (tile - 1) + [Fraction(1)]
    results = [[*(point**power for point in points), last[power]] for power in range(tile)]
    kernels: list[list[Fraction]] = []
    data: list[list[Fraction]] = []
    for point in points:
        others = [other for other in points if other != point]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        kernels.append([point**power / scale for power in range(side)])
        data.append([*_polynomial(others), Fraction(0)])
    kernels.append([Fraction(0)] * (side - 1) + [Fraction(1)])
    data.append(_polynomial(points))
    first, second, third = ([[float(each) for each in row] for row in rows] for rows in (results, kernels, data))
    return first, second, third


def _points(count: int) -> list[Fraction]:
    """Small numbers and their inverses: their powers stay near 1."""
    found = [Fraction(0)]
    for size in (Fraction(1), Fraction(2), Fraction(1, 2), Fraction(3), Fraction(1, 3)):
        found += [size, -size]
    return found[:count]


def _polynomial(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients, lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *found], [*(-root * each for each in found), Fraction(0)]
        found = [one + two for one, two in zip(shifted, scaled, strict=True)]
    return found
