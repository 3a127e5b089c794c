"""Blocks of elements that share a scale, so that one large element spoils the resolution of its neighbours only; and
rounding at random to levels of a block's largest element, which is right on average.
"""

from __future__ import annotations

import torch

from shoal.comm.compress.method import Draw
from shoal.comm.compress.traffic import LEVEL_BLOCK


def in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[blocks, size], the last one filled up with zeros; a view where nothing is to be filled."""
    surplus = -len(x) % size
    if surplus:
        x = torch.cat([x, x.new_zeros(surplus)])
    return x.view(-1, size)


def largest_of_each(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(1)


def rounded_at_random(x: torch.Tensor, levels: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's largest magnitude, and each element's level in -levels ... levels of it (as a float).

    A magnitude between two levels takes the upper one with the probability that makes the expectation exact.
    """
    blocks = in_blocks(x, LEVEL_BLOCK)
    scales = largest_of_each(blocks)
    exact = (blocks / torch.where(scales == 0, 1.0, scales)[:, None]).view(-1)[: len(x)].mul_(levels)
    lower = exact.abs().floor_()
    # Compared with the fraction and not added to it: a sum near a whole number would round, and always upwards.
    chance = torch.rand(len(x), generator=draw.own(x.device), dtype=x.dtype, device=x.device)
    upper = chance < exact.abs() - lower
    return scales, lower.add_(upper).copysign_(exact)


def from_levels(signed: torch.Tensor, scales: torch.Tensor, levels: int) -> torch.Tensor:
    """The elements that signed levels of their blocks' scales stand for."""
    # In this order nothing overflows and a denormal scale is not lost.
    return (in_blocks(signed, LEVEL_BLOCK) / levels).mul_(scales[:, None]).view(-1)[: len(signed)]
