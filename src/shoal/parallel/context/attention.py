"""Attention over a sequence that is cut among ranks: the ways that `cp` may name, each in the place of
`F.scaled_dot_product_attention`.

Ring and Ulysses give the same numbers as full sequences on one rank. The ring holds any number of heads and cuts
memory for keys and values by n; Ulysses sends less where there are many ranks, but needs heads to divide by them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.parallel.context.attention_call import AttentionError
from shoal.parallel.context.ring import ring_attention
from shoal.parallel.context.sequence import chunks_of, positions
from shoal.parallel.context.ulysses import ulysses_attention

BY_METHOD: dict[str, Callable[..., torch.Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}
"""By the method that the strategy's `cp` term names."""


def is_balanced(method: str, *, causal: bool) -> bool:
    """Which cut of the sequence goes with a method: two chunks a rank where causal work would be uneven."""
    return method == "ring" and causal


__all__ = [
    "AttentionError",
    "BY_METHOD",
    "chunks_of",
    "is_balanced",
    "positions",
    "ring_attention",
    "ulysses_attention",
]
