"""What every compression has in common: a reduction over ranks that sends less than the tensor, with a state that keeps
what was not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.compress import traffic
from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.exchange import Agree, Reduction, Sum, Total, run
from shoal.comm.compress.finite import is_finite, or_nan
from shoal.comm.compress.given import CompressError, Draw, Over, State
from shoal.strategy.terms.compress import CompressTerm, Transfer


class Method:
    """A compression of gradients, made for one term; it holds no state of its own."""

    def __init__(self, term: CompressTerm, *, clip: float | None = None) -> None:
        """`clip`: the job's bound on the norm of the gradient, for methods that apply it on each rank."""
        self.term, self.clip = term, clip
        self.keeps = term.keeps if isinstance(term, Compressor) else ()
        """What is kept of each element."""
        self.extras = term.extras if isinstance(term, Compressor) else ()
        """What else is kept."""

    def reduction(self, x: torch.Tensor, state: State, over: Over, draw: Draw) -> Reduction:
        """The sum over ranks of what each sends of `x`, bitwise the same on all of them.

        `x` is this rank's part of the mean gradient, in the parameter's shape, float32 or float64, and stays as it is.
        What is not sent goes into `state`. Where any rank's part is not finite, the sum holds NaN on every rank and no
        state changes, neither this one nor that of another tensor that is reduced with it: a step that overflowed
        leaves no trace, whether it is then skipped or ends the run.
        """
        if x.numel() == 0:
            return x.clone()
        value, kept = self._take_up(_flat(x), state, over)
        total = yield from self._total(or_nan(value, is_finite(value)), x.shape, kept, over, draw)
        if (yield Agree(is_finite(total))):
            state.update(kept)
        return total.view(x.shape)

    def _take_up(self, x: torch.Tensor, state: State, over: Over) -> tuple[torch.Tensor, State]:
        if not isinstance(self.term, Compressor):
            return x, dict(state)
        value, taken_up = self.term.take_up(x, state, over, self.clip)
        return value, {**state, **taken_up}

    def _total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        if not isinstance(self.term, Compressor):  # none(): the all-reduce that the others are measured against.
            return (yield Sum(value))
        return (yield from self.term.total(value, shape, kept, over, draw))

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
