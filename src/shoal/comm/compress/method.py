"""What every compression has in common: a reduction over ranks that sends less than the tensor, with a state that keeps
what was not sent. Random draws are functions of (seed, step, parameter, rank), so a resumed run draws what the
uninterrupted one would have drawn, and all ranks can draw alike without a message.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shoal.comm.compress import traffic
from shoal.comm.compress.traffic import Transfer

if TYPE_CHECKING:
    from shoal.strategy.compress import CompressTerm

State = dict[str, torch.Tensor]
"""What is kept for one parameter on one rank; empty at the start, and part of a checkpoint. "residual" and "velocity"
are flat and as long as the parameter; PowerSGD's "query" is [columns, rank], the same on all ranks."""


class CompressError(ValueError):
    """A tensor or a state that a compression cannot take."""


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
        return self._generator(torch.device("cpu"), "shared")

    def own(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Different on each rank."""
        return self._generator(torch.device(device), f"rank {self.rank}")

    def _generator(self, device: torch.device, who: str) -> torch.Generator:
        text = f"{self.seed}\n{self.step}\n{who}\n{self.key}"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


@dataclass(kw_only=True, slots=True)
class Over:
    """The ranks a reduction is over, as one of them sees them."""

    group: dist.ProcessGroup | None = None
    """None: one rank, nothing is sent."""
    size: int = 1
    rank: int = 0
    inside: Over | None = None
    """Those on the same host; None: a host each."""
    between: Over | None = None
    """Those at the same place on each host; None: all of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or (self.group is None) != (self.size == 1):
            raise CompressError(
                f"rank {self.rank} of {self.size} with{'out' if self.group is None else ''} a group: expected "
                "0 <= rank < size, and a group for more than one rank only"
            )
        if (self.inside is None) != (self.between is None):
            raise CompressError("of `inside` and `between` one alone was given; expected both or neither")
        if self.inside is not None and self.between is not None and self.inside.size * self.between.size != self.size:
            raise CompressError(
                f"{self.between.size} hosts of {self.inside.size} ranks are not the {self.size} ranks of the group; "
                "expected as many ranks on each host"
            )


class Method(ABC):
    """A compression of gradients, made for one term; it holds no state of its own."""

    def __init__(self, term: CompressTerm) -> None:
        self.term = term

    @abstractmethod
    def reduce(self, x: torch.Tensor, state: State, over: Over, draw: Draw) -> torch.Tensor:
        """The sum over ranks of what each sends of `x`, bitwise the same on all of them.

        `x` is this rank's part of the mean gradient, in the parameter's shape, float32 or float64, and stays as it is.
        What is not sent goes into `state`. Where any rank's part is not finite, the sum holds NaN on every rank and no
        state changes: a step that overflowed leaves no trace, whether it is then skipped or ends the run.
        """

    def pays(self, shape: Sequence[int], itemsize: int, *, ranks: int = 2, inside: int = 1) -> bool:
        """Whether compressing such a tensor can pay at all (see `traffic.pays`)."""
        return traffic.pays(self.term, shape, itemsize, ranks=ranks, inside=inside)

    def sent_bytes(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0, inside: int = 1
    ) -> list[Transfer] | None:
        """The collectives that `reduce` makes on rank `rank`; None where data decide (see `traffic.sent_bytes`)."""
        return traffic.sent_bytes(self.term, shape, itemsize, ranks, step, rank=rank, inside=inside)


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in a row, once it is clear that a method can work on them."""
    if x.dtype not in (torch.float32, torch.float64):
        raise CompressError(f"a gradient of {x.dtype} was given; expected float32 or float64, so convert it first")
    return x.detach().reshape(-1)


def is_finite(x: torch.Tensor) -> bool:
    """Whether no element is inf or NaN."""
    if x.numel() == 0:
        return True
    low, high = torch.aminmax(x)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def spoilt_if_not_finite(x: torch.Tensor) -> torch.Tensor:
    """The same, or all NaN if any element is not finite: so whatever a method picks to send, the others see it."""
    return x if is_finite(x) else torch.full_like(x, float("nan"))
