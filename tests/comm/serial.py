"""Many ranks in one thread: their collectives take turns, and what they should give is computed beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from shoal.comm.peers import Peers, Steps
from shoal.comm.transport.memory import memory_links
from shoal.comm.vector import Vector

TURNS = 1_000_000
"""More than any of them needs: who has not ended by then never will."""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def sizes(ranks: int) -> list[int]:
    """None, one, around the number of ranks, a prime, and more than a link holds."""
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 101, 2503})


def group(ranks: int, *, per_host: int | None = None, capacity: int = 1 << 10) -> list[Peers]:
    links = memory_links(ranks, capacity)
    width = per_host or ranks
    hosts = [list(range(first, min(first + width, ranks))) for first in range(0, ranks, width)]
    return [Peers(rank, ranks, links[rank], hosts=hosts) for rank in range(ranks)]


def take_turns(collectives: Iterable[Steps]) -> None:
    """Each moves as far as it gets, until all are done."""
    alive = list(collectives)
    for _ in range(TURNS):
        if not alive:
            return
        alive = [steps for steps in alive if next(steps, None) is not None]
    raise AssertionError(f"{len(alive)} ranks wait for each other for ever")


def together(peers: Sequence[Peers], kind: str, call: Callable[[Peers], Steps]) -> None:
    for each in peers:
        each.begin(kind)
    take_turns(call(each) for each in peers)


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on every rank, whose sums are exact in every type."""
    values = (torch.arange(size) * (rank + 3) + rank) % 7
    return values.bool() if dtype is torch.bool else values.to(dtype)


def summed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(tensors))
    return stacked.any(0) if stacked.dtype is torch.bool else stacked.double().sum(0).to(stacked.dtype)


def vectors(tensors: Sequence[torch.Tensor]) -> list[Vector]:
    return [Vector(tensor) for tensor in tensors]
