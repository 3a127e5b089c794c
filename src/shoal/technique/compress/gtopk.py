"""gTop-k (Shi et al. 2019): the k largest of the sum, found by a tree of merges; each sends k elements, not k times P.

A merge adds two lists of k elements and keeps the k largest of the sum; after ceil(log2 P) rounds rank 0 has the result
and broadcasts it. As in the paper, what a rank chose and what is not among the k of the result stays in its residual.
One thing the paper loses: an element that one merge dropped and that came into the result by another branch. The rank
that dropped it keeps it here, so nothing is lost: over all ranks, sent and kept are the gradient.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from shoal.comm.compress.compressor import SparseCompressor
from shoal.comm.compress.sizes import kept_count, sparse_bytes
from shoal.strategy.terms.arguments import real
from shoal.strategy.terms.compress import Transfer
from shoal.strategy.terms.numerals import percent

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.exchange import Ask, Total
    from shoal.comm.compress.given import Draw, Over, State

    Sparse = tuple[torch.Tensor, torch.Tensor]
    """Values and their places."""


class gtopk(SparseCompressor):
    """gTop-k: a tree of merges keeps the k largest of the sum, not k from each replica."""

    r: float = real(0.0, 1.0, sample=0.01)

    title = "gTop-k"
    sends = "rn (4 + s) along a tree: the largest of the sum"
    collective_only = True
    within = 0.3
    passes = (35, 3.9)

    def words(self) -> str:
        return f"a tree of pairwise merges keeps the largest {percent(self.r)} of the sum of all replicas"

    def transfers(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        payload = sparse_bytes(kept_count(self.r, prod(shape)), itemsize)
        calls, distance = [], 1
        while distance < ranks:
            if rank % (2 * distance) == distance:
                calls.append(Transfer("send", payload))
                break
            if rank + distance < ranks:
                calls.append(Transfer("recv", payload))
            distance *= 2
        return [*calls, Transfer("broadcast", payload)]

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        from shoal.comm.compress.largest import largest

        return largest(x, kept_count(self.r, len(x)))

    def total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        import torch

        from shoal.comm.compress.payload import sparse_parts

        payload = self.encode(value, draw)
        (values, places), dropped = yield from merged_by_tree(payload, over, value.dtype)
        in_result = torch.zeros(len(value), dtype=torch.bool, device=value.device)
        in_result[places.long()] = True
        residual = kept["residual"]
        _, mine = sparse_parts(payload, value.dtype)
        residual[mine[in_result[mine.long()]].long()] = 0
        for lost, where in dropped:
            again = in_result[where.long()]
            residual.index_add_(0, where[again], lost[again])
        return torch.zeros_like(value).index_add_(0, places, values)


def merged_by_tree(
    payload: torch.Tensor, over: Over, dtype: torch.dtype
) -> Generator[Ask, Any, tuple[Sparse, list[Sparse]]]:
    """The k largest of the sum, on every rank; and what the merges on this rank dropped."""
    from shoal.comm.compress.exchange import ReceiveFrom, SendTo, Spread
    from shoal.comm.compress.payload import sparse_parts, sparse_payload

    dropped: list[Sparse] = []
    distance = 1
    while distance < over.size:
        if over.rank % (2 * distance) == distance:
            yield SendTo(payload, over.rank - distance)
            break
        if over.rank + distance < over.size:
            arrived = yield ReceiveFrom(payload, over.rank + distance)
            best, rest = merged(sparse_parts(payload, dtype), sparse_parts(arrived, dtype))
            payload = sparse_payload(*best)
            dropped.append(rest)
        distance *= 2
    payload = yield Spread(payload)
    return sparse_parts(payload, dtype), dropped


def merged(first: Sparse, second: Sparse) -> tuple[Sparse, Sparse]:
    """The k largest of the sum of two sparse tensors of k elements, and what is left of it."""
    import torch

    count = len(first[0])
    places, inverse = torch.cat([first[1], second[1]]).unique(return_inverse=True)
    values = torch.zeros(len(places), dtype=first[0].dtype, device=places.device)
    # One after the other: the lower rank's part comes first in every sum.
    values.index_add_(0, inverse[:count], first[0]).index_add_(0, inverse[count:], second[0])
    chosen = torch.zeros(len(places), dtype=torch.bool, device=places.device)
    chosen[values.abs().topk(count, sorted=False).indices] = True
    return (values[chosen], places[chosen]), (values[~chosen], places[~chosen])
