"""How a tensor becomes bytes: the base of all codecs.

A codec whose payloads are gathered gives bytes (uint8), everything needed to read them included. One whose payloads
add (`adds`) gives numbers, so that an all-reduce of payloads is the payload of the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from shoal.comm.compress.given import CompressError, Draw
from shoal.comm.compress.payload import Reader, laid_out
from shoal.comm.compress.traffic import LARGEST_INDEX


class Codec(ABC):
    """Turns flat tensors into payloads and back. It has no memory: what a payload does not say, `draw` does."""

    adds: bool = False
    """Whether payloads of ranks may be added."""

    @abstractmethod
    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The payload of a flat tensor."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        """The flat tensor that a payload stands for."""

    def add(self, payload: torch.Tensor, into: torch.Tensor, draw: Draw, *, alpha: int = 1) -> None:
        """Adds `alpha` times what a payload stands for; cheaper than `decode` where that is mostly zeros."""
        into.add_(self.decode(payload, len(into), into.dtype, draw), alpha=alpha)


class SparseCodec(Codec):
    """Some of the elements, with their places: values in the tensor's own type, then indices of 32 bits."""

    @abstractmethod
    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The places of the elements to send, int64, each once."""

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        if len(x) > LARGEST_INDEX:
            raise CompressError(f"{len(x)} elements have no places of 32 bits; compress a part of the tensor at a time")
        places = self.choose(x, draw)
        return sparse_payload(x[places], places)

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        dense = torch.zeros(num_elements, dtype=dtype, device=payload.device)
        self.add(payload, dense, draw)
        return dense

    def add(self, payload: torch.Tensor, into: torch.Tensor, draw: Draw, *, alpha: int = 1) -> None:
        values, places = sparse_parts(payload, into.dtype)
        into.index_add_(0, places, values, alpha=alpha)


def added(payloads: Sequence[torch.Tensor], codec: Codec, like: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The sum of what payloads stand for, in their order."""
    total = codec.decode(payloads[0], len(like), like.dtype, draw)
    for payload in payloads[1:]:
        codec.add(payload, total, draw)
    return total


def sparse_payload(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return laid_out(values, places.int())


def sparse_parts(payload: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and their places."""
    count = len(payload) // (dtype.itemsize + torch.int32.itemsize)
    reader = Reader(payload)
    return reader.take(count, dtype), reader.take(count, torch.int32)
