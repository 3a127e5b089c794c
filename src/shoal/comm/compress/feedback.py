"""What is kept as error: nothing, a residual that is added to the next gradient (error feedback), or the pair that deep
gradient compression keeps. A feedback takes a gradient up before it is encoded, and settles what was really sent,
from the very payload, afterwards; until then the state is untouched, so a step that fails leaves it whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shoal.comm.compress.codec import Codec, SparseCodec, sparse_parts
from shoal.comm.compress.given import CompressError, Draw, Over, State

MOMENTUM = 0.9
"""DGC's factor m, as in its paper."""


class Feedback(ABC):
    """How the error of one step reaches the next."""

    keeps: tuple[str, ...] = ()
    """What it keeps for each element."""

    @abstractmethod
    def take_up(self, x: torch.Tensor, state: State, over: Over) -> tuple[torch.Tensor, State]:
        """What to encode in place of the gradient, and the state as it would be if nothing were sent."""

    @abstractmethod
    def settle(self, kept: State, codec: Codec, payload: torch.Tensor, draw: Draw) -> None:
        """Takes what was sent out of the state that `take_up` gave."""


class Nothing(Feedback):
    """The error is forgotten: right for codecs that are right on average, or nearly exact."""

    def take_up(self, x: torch.Tensor, state: State, over: Over) -> tuple[torch.Tensor, State]:
        return x, {}

    def settle(self, kept: State, codec: Codec, payload: torch.Tensor, draw: Draw) -> None:
        return None


class Residual(Feedback):
    """Error feedback (Seide et al. 2014): what was not sent of x + e is the next e."""

    keeps: tuple[str, ...] = ("residual",)

    def take_up(self, x: torch.Tensor, state: State, over: Over) -> tuple[torch.Tensor, State]:
        before = kept_before(state, "residual", x)
        total = x.clone() if before is None else x + before
        return total, {"residual": total}

    def settle(self, kept: State, codec: Codec, payload: torch.Tensor, draw: Draw) -> None:
        codec.add(payload, kept["residual"], draw, alpha=-1)


class MomentumCorrection(Residual):
    """DGC (Lin et al. 2018): momentum is kept on each rank and accumulated there, and elements are sent from the sum.

        u <- m u + g,  v <- v + u,  send the largest of v;  where sent: v <- 0, u <- 0 (momentum factor masking)

    Before that each rank clips its part of the gradient at clip / sqrt(ranks) (local clipping): independent parts of
    that size sum to one of size `clip`. The paper takes the norm of the whole gradient; here every tensor is clipped
    alone, which is never stricter.
    """

    keeps = ("residual", "velocity")

    def __init__(self, *, clip: float | None) -> None:
        self.clip = clip

    def take_up(self, x: torch.Tensor, state: State, over: Over) -> tuple[torch.Tensor, State]:
        if self.clip is not None:
            norm = torch.linalg.vector_norm(x, dtype=torch.float64)
            bound = self.clip / over.size**0.5
            # In host memory a pass is saved where nothing is clipped; an accelerator is not waited for.
            if x.device.type != "cpu" or norm > bound:
                x = x * (bound / norm).clamp(max=1.0).to(x.dtype)
        velocity = kept_before(state, "velocity", x)
        velocity = x.clone() if velocity is None else torch.add(x, velocity, alpha=MOMENTUM)
        total, kept = super().take_up(velocity, state, over)
        return total, {**kept, "velocity": velocity}

    def settle(self, kept: State, codec: Codec, payload: torch.Tensor, draw: Draw) -> None:
        assert isinstance(codec, SparseCodec)
        super().settle(kept, codec, payload, draw)
        velocity = kept["velocity"]
        _, places = sparse_parts(payload, velocity.dtype)
        velocity.index_fill_(0, places.long(), 0.0)


def kept_before(state: State, name: str, x: torch.Tensor) -> torch.Tensor | None:
    """An entry of the state in x's type and place; None at the start."""
    before = state.get(name)
    if before is None:
        return None
    if before.shape != x.shape:
        raise CompressError(
            f'the state\'s "{name}" has shape {list(before.shape)}; expected {list(x.shape)}, as the gradient laid out '
            "flat: it belongs to another parameter, or to a part that was cut otherwise"
        )
    return before.to(x)
