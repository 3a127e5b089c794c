"""How a sequence is cut among the ranks of context parallelism.

Under a causal mask late positions see more than early ones, so one contiguous chunk each would leave the last rank with
most of the work. The balanced cut makes two chunks a rank and pairs an early with a late one: rank i of n holds chunks
i and 2n-1-i, and every rank does the same number of chunk products. Where work does not depend on the position (no
causal mask, or full sequences per head) one contiguous chunk serves.
"""

from __future__ import annotations

import torch


def chunks_of(length: int, ranks: int, index: int, *, balanced: bool) -> tuple[slice, ...]:
    """The positions that rank `index` of `ranks` holds, as slices of the full sequence in the order it holds them."""
    if ranks < 1 or not 0 <= index < ranks:
        raise ValueError(f"There is no rank {index} among {ranks}; give an index from 0 to ranks - 1.")
    parts = 2 * ranks if balanced else ranks
    if length < 1 or length % parts:
        each = "two equal chunks on each" if balanced else "equal chunks, one on each"
        raise ValueError(
            f"A sequence of {length} positions cannot be cut into {each} of {ranks} ranks; "
            f"make its length a positive multiple of {parts}."
        )
    size = length // parts
    held = (index, parts - 1 - index) if balanced else (index,)
    return tuple(slice(chunk * size, (chunk + 1) * size) for chunk in held)


def positions(
    length: int, ranks: int, index: int, *, balanced: bool, device: torch.device | str | None = None
) -> torch.Tensor:
    """The same as global positions, int64: `x[:, positions(...)]` is what the rank holds of x."""
    chunks = chunks_of(length, ranks, index, balanced=balanced)
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])
