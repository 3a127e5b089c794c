"""A method put together from its three parts: a feedback, a codec and the exchange that suits the codec."""

from __future__ import annotations

import torch

from shoal.comm.compress.codec import Codec
from shoal.comm.compress.exchange import added, gathered, gathered_unequal, summed
from shoal.comm.compress.feedback import Feedback
from shoal.comm.compress.method import Draw, Method, Over, State, flat, is_finite, spoilt_if_not_finite
from shoal.strategy.compress import CompressTerm


class Compressed(Method):
    """Take up the error, encode, exchange, settle."""

    def __init__(self, term: CompressTerm, *, codec: Codec, feedback: Feedback, equal_sizes: bool = True) -> None:
        """`equal_sizes`: whether the payloads of all ranks are known to be of one size."""
        super().__init__(term)
        self.codec, self.feedback, self.equal_sizes = codec, feedback, equal_sizes

    def reduce(self, x: torch.Tensor, state: State, over: Over, draw: Draw) -> torch.Tensor:
        if x.numel() == 0:
            return x.clone()
        value, kept = self.feedback.take_up(flat(x), state, over)
        value = spoilt_if_not_finite(value)
        payload = self.codec.encode(value, draw)
        total = self._sum(payload, value, over, draw)
        if is_finite(total):
            self.feedback.settle(kept, self.codec, payload, draw)
            state.update(kept)
        return total.view(x.shape)

    def _sum(self, payload: torch.Tensor, like: torch.Tensor, over: Over, draw: Draw) -> torch.Tensor:
        if self.codec.adds:
            return self.codec.decode(summed(payload, over), len(like), like.dtype, draw)
        exchange = gathered if self.equal_sizes else gathered_unequal
        return added(exchange(payload, over), self.codec, like, draw)
