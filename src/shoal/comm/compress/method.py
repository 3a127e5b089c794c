"""What every compression has in common: a reduction over ranks that sends less than the tensor, with a state that keeps
what was not sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.comm.compress import traffic
from shoal.comm.compress.exchange import Agree, Ask, Reduction, run
from shoal.comm.compress.feedback import Feedback, Nothing
from shoal.comm.compress.given import CompressError, Draw, Over, State
from shoal.comm.compress.traffic import Transfer

if TYPE_CHECKING:
    from shoal.strategy.terms.compress import CompressTerm

Total = Generator[Ask, Any, torch.Tensor]


class Method(ABC):
    """A compression of gradients, made for one term; it holds no state of its own."""

    feedback: Feedback = Nothing()

    def __init__(self, term: CompressTerm) -> None:
        self.term = term

    def reduction(self, x: torch.Tensor, state: State, over: Over, draw: Draw) -> Reduction:
        """The sum over ranks of what each sends of `x`, bitwise the same on all of them.

        `x` is this rank's part of the mean gradient, in the parameter's shape, float32 or float64, and stays as it is.
        What is not sent goes into `state`. Where any rank's part is not finite, the sum holds NaN on every rank and no
        state changes, neither this one nor that of another tensor that is reduced with it: a step that overflowed
        leaves no trace, whether it is then skipped or ends the run.
        """
        if x.numel() == 0:
            return x.clone()
        value, taken_up = self.feedback.take_up(_flat(x), state, over)
        kept = {**state, **taken_up}
        total = yield from self._total(or_nan(value, is_finite(value)), x.shape, kept, over, draw)
        if (yield Agree(is_finite(total))):
            state.update(kept)
        return total.view(x.shape)

    @abstractmethod
    def _total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        """The sum of what all ranks send of their flat values, and out of `kept` what was sent. NaN on any rank must
        come out as NaN on all."""

    def reduce(self, x: torch.Tensor, state: State, over: Over, draw: Draw) -> torch.Tensor:
        """One tensor's `reduction`, by itself."""
        return run([self.reduction(x, state, over, draw)], over)[0]

    def pays(self, shape: Sequence[int], itemsize: int, *, ranks: int = 2) -> bool:
        """Whether compressing such a tensor can pay at all (see `traffic.pays`)."""
        return traffic.pays(self.term, shape, itemsize, ranks=ranks)

    def sent_bytes(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        """The collectives that `reduce` makes on rank `rank`; None where data decide (see `traffic.sent_bytes`)."""
        return traffic.sent_bytes(self.term, shape, itemsize, ranks, step, rank=rank)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in a row, once it is clear that a method can work on them."""
    if x.dtype not in (torch.float32, torch.float64):
        raise CompressError(f"a gradient of {x.dtype} was given; expected float32 or float64, so convert it first")
    return x.detach().reshape(-1)


def is_finite(x: torch.Tensor) -> torch.Tensor:
    """Whether no element is inf or NaN, as a tensor without dimensions: the host need not wait for it."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(x)
    return torch.isfinite(low) & torch.isfinite(high)


def or_nan(x: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """The same, or all NaN if it is not finite: so whatever a method picks to send, the others see it. In host memory
    the host decides and saves a pass; on an accelerator it does not wait for the answer."""
    if x.device.type == "cpu":
        return x if finite else torch.full_like(x, float("nan"))
    return torch.where(finite, x, float("nan"))
