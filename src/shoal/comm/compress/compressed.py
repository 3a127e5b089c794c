"""A method put together from its three parts: a feedback, a codec and the exchange that suits the codec."""

from __future__ import annotations

import torch

from shoal.comm.compress.codec import Codec, added
from shoal.comm.compress.exchange import Gather, Sum
from shoal.comm.compress.feedback import Feedback
from shoal.comm.compress.given import Draw, Over, State
from shoal.comm.compress.method import Method, Total
from shoal.strategy.terms.compress import CompressTerm


class Compressed(Method):
    """Encode, exchange, settle."""

    def __init__(self, term: CompressTerm, *, codec: Codec, feedback: Feedback, equal_sizes: bool = True) -> None:
        """`equal_sizes`: whether the payloads of all ranks are known to be of one size."""
        super().__init__(term)
        self.codec, self.feedback, self.equal_sizes = codec, feedback, equal_sizes

    def _total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        payload = self.codec.encode(value, draw)
        if self.codec.adds:
            total = self.codec.decode((yield Sum(payload)), len(value), value.dtype, draw)
        else:
            total = added((yield Gather(payload, equal=self.equal_sizes)), self.codec, value, draw)
        self.feedback.settle(kept, self.codec, payload, draw)
        return total
