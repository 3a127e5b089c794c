"""HiTopKComm (Shi et al. 2021): dense inside a host, sparse between hosts.

Ranks of a host sum their gradients by a reduce-scatter, so each owns a shard; of each shard the largest elements (found
as MSTopK does) go to the same shard's owners on the other hosts; an all-gather inside the host makes the tensor whole.
The error of a shard is its owner's: the residual is as long as the parameter, and zero outside the shard.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.comm.compress.blocks import filled_up
from shoal.comm.compress.exchange import added, gathered
from shoal.comm.compress.feedback import Residual
from shoal.comm.compress.method import Draw, Method, Over, State, flat, is_finite
from shoal.comm.compress.mstopk import MsTopK
from shoal.comm.compress.traffic import divided_up
from shoal.strategy.compress import hitopk


class HiTopK(Method):
    """A fraction r of the elements of each shard goes between hosts. Inside a host nothing is left out."""

    def __init__(self, term: hitopk) -> None:
        super().__init__(term)
        self.codec = MsTopK(fraction=term.r)
        self.feedback = Residual()

    def reduce(self, x: torch.Tensor, state: State, over: Over, draw: Draw) -> torch.Tensor:
        if x.numel() == 0:
            return x.clone()
        inside, between = over.inside or Over(), over.between or over
        # Residuals are zero outside their shards, so the sum over the host adds each to its own.
        value, _ = self.feedback.take_up(flat(x), state, over)
        # What is no number counts as the largest of all, and is sent.
        shard = _reduce_scattered(value, inside)
        kept = torch.zeros_like(value)
        if between.size == 1:
            total = shard
        else:
            payload = self.codec.encode(shard, draw)
            total = added(gathered(payload, between), self.codec, shard, draw)
            self.codec.add(payload, shard, draw, alpha=-1)
            mine = kept[inside.rank * len(shard) :][: len(shard)]
            mine.copy_(shard[: len(mine)])
        whole = torch.cat(gathered(total, inside))[: len(value)]
        if is_finite(whole):
            state["residual"] = kept
        return whole.view(x.shape)


def _reduce_scattered(value: torch.Tensor, inside: Over) -> torch.Tensor:
    """This rank's shard of the sum over its host; the last ones are filled up with zeros."""
    if inside.group is None:
        return value
    size = divided_up(len(value), inside.size)
    shard = value.new_empty(size)
    dist.reduce_scatter_single(shard, filled_up(value, inside.size * size), group=inside.group)
    return shard
