"""What a reduction is given: the ranks it is over, where its random numbers come from, and what it kept so far.

Random draws are functions of (seed, step, parameter, rank), so a resumed run draws what the uninterrupted one would
have drawn, and all ranks can draw alike without a message.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from shoal.comm.compress.compressor import CompressError

State = dict[str, torch.Tensor]
"""What is kept for one parameter on one rank; empty at the start, and part of a checkpoint. What a method
`keeps` is flat and as long as the parameter; anything else (PowerSGD's "query") is the same on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """A group of ranks and this one's place in it."""

    group: dist.ProcessGroup | None = None
    """None: one rank, nothing is sent."""
    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or (self.group is None) != (self.size == 1):
            raise CompressError(
                f"rank {self.rank} of {self.size} with{'out' if self.group is None else ''} a group: expected "
                "0 <= rank < size, and a group for more than one rank only"
            )


@dataclass(frozen=True, slots=True)
class Draw:
    """Where random numbers come from."""

    seed: int
    step: int
    key: str
    """The parameter's name."""
    rank: int

    def shared(self) -> torch.Generator:
        """The same on all ranks. In host memory, wherever the tensor lies: what a GPU draws depends on its model."""
        return torch.Generator().manual_seed(self._seed("shared"))

    def number(self, below: int) -> int:
        """A number from 0 to below `below`, the same on all ranks."""
        return self._seed("number") % below

    def alike(self, count: int, device: torch.device | str) -> torch.Tensor:
        """Integers below 2**32 (int64), the same on all ranks, computed where they are needed. SplitMix64 (Steele
        et al. 2014) of a counter: integers wrap alike on every device, while generators differ between devices."""
        mixed = torch.arange(1, count + 1, device=device).mul_(-0x61C8864680B583EB).add_(_signed(self._seed("shared")))
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
        return mixed.bitwise_right_shift_(32).bitwise_and_((1 << 32) - 1)

    def chances(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Numbers from 0 to 1, different on each rank, of the type and in the place of `like`."""
        if like.device.type == "cpu":
            # NumPy's generator draws them in two thirds of torch's time.
            generator = np.random.Generator(np.random.SFC64(self._seed(f"rank {self.rank}")))
            return torch.from_numpy(generator.random(count, dtype=np.float32 if like.itemsize == 4 else np.float64))
        drawing = torch.Generator(like.device).manual_seed(self._seed(f"rank {self.rank}"))
        return torch.rand(count, generator=drawing, dtype=like.dtype, device=like.device)

    def _seed(self, purpose: str) -> int:
        text = f"{self.seed}\n{self.step}\n{purpose}\n{self.key}"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _signed(number: int) -> int:
    """The same 64 bits as int64 reads them."""
    return number - (1 << 64) if number >> 63 else number
