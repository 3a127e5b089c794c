"""Blocks of elements that share a scale, so that one large element spoils the resolution of its neighbours only; and
rounding at random to levels of a block's largest element, which is right on average.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.given import Draw
from shoal.comm.compress.sizes import BLOCK, divided_up


def filled_up(x: torch.Tensor, length: int) -> torch.Tensor:
    """A flat tensor with zeros behind it; itself where none are missing."""
    return x if len(x) == length else torch.cat([x, x.new_zeros(length - len(x))])


def in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[blocks, size], the last one filled up with zeros; a view where none are missing."""
    return filled_up(x, divided_up(len(x), size) * size).view(-1, size)


def block_sizes(length: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """How many elements each block really has, as numbers of the type of `like`."""
    sizes = torch.full((divided_up(length, size),), float(size), dtype=like.dtype, device=like.device)
    if length % size:
        sizes[-1] = length % size
    return sizes


def divisors(scales: torch.Tensor) -> torch.Tensor:
    """A column of scales to divide blocks by: a block of zeros is divided by one."""
    return torch.where(scales == 0, 1.0, scales)[:, None]


def rounded_at_random(x: torch.Tensor, levels: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's largest magnitude, and the level, from 0 to `levels` parts of it, of each element's magnitude.

    A magnitude between two levels takes the upper one with the probability that makes the expectation exact.
    """
    blocks = in_blocks(x.abs(), BLOCK)
    scales = blocks.amax(1)
    exact = blocks.div_(divisors(scales)).mul_(levels).view(-1)[: len(x)]
    lower = exact.floor()
    # Compared with the fraction and not added to it: a sum near a whole number would round, and always upwards.
    return scales, lower.add_(draw.chances(len(x), x) < exact.sub_(lower))


def from_levels(signed: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """The elements that signed levels of their blocks' scales encode."""
    # In this order nothing overflows and a denormal scale is not lost.
    return in_blocks(signed / levels, BLOCK).mul_(scales[:, None]).view(-1)[: len(signed)]
