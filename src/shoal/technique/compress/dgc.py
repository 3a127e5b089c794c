"""Deep gradient compression (Lin et al. 2018): top-k of an accumulated momentum, with a gentle start.

    u <- m u + g,  v <- v + u,  send the largest of v;  where sent: v <- 0, u <- 0 (momentum factor masking)

Momentum is applied here, on each rank, before elements are chosen. The job's optimiser should therefore be plain SGD,
without momentum of its own. In its first steps it sends more: a quarter of the elements, a sixteenth and so on, down
to its fraction (`warm_up_fraction`).

Before that each rank clips its part of the gradient at clip / sqrt(ranks) (local clipping): independent parts of that
size sum to one of size `clip`. The paper takes the norm of the full gradient; here every tensor is clipped alone,
which is never stricter.

Masking momentum where elements were sent is not linear in the gradient. Where ranks see alike data that is harmless;
where their gradients differ in the mean (each rank its own kind of data), they do not quite cancel at the optimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import SparseCompressor, kept_before
from shoal.comm.compress.sizes import kept_count, sparse_bytes
from shoal.strategy.terms.arguments import real
from shoal.strategy.terms.numerals import percent

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.given import Draw, Over, State

MOMENTUM = 0.9
"""The factor m, as in the paper."""
WARM_UP_RATIO = 0.25
WARM_UP_STEPS = 25
"""A quarter, a sixteenth, ... of the elements is sent, each for this number of steps. The paper changes it every
epoch, four times; here an epoch is not known."""


class dgc(SparseCompressor):
    """Deep gradient compression: top-k with momentum correction, local clipping and warm-up."""

    r: float = real(0.0, 1.0, sample=0.01)

    title = "deep gradient compression"
    sends = "rn (4 + s), more in the first 100 steps; momentum is applied before the selection: use plain SGD"
    within = 0.3
    passes = (42, 0.2)

    def words(self) -> str:
        return (
            f"the largest {percent(self.r)} of the elements are sent, with corrected momentum, clipping "
            "before the choice "
            "and a gentle start (DGC)"
        )

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        return sparse_bytes(kept_count(warm_up_fraction(self.r, step), num_elements), itemsize)

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        from shoal.comm.compress.largest import largest

        return largest(x, kept_count(warm_up_fraction(self.r, draw.step), len(x)))

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("residual", "velocity")

    def take_up(
        self, x: torch.Tensor, state: State, over: Over, clip: float | None = None
    ) -> tuple[torch.Tensor, State]:
        import torch

        if clip is not None:
            norm = torch.linalg.vector_norm(x, dtype=torch.float64)
            bound = clip / over.size**0.5
            # In host memory a pass is saved where nothing is clipped; an accelerator is not waited for.
            if x.device.type != "cpu" or norm > bound:
                x = x * (bound / norm).clamp(max=1.0).to(x.dtype)
        velocity = kept_before(state, "velocity", x)
        velocity = x.clone() if velocity is None else torch.add(x, velocity, alpha=MOMENTUM)
        total, kept = super().take_up(velocity, state, over)
        return total, {**kept, "velocity": velocity}

    def settle(self, kept: State, payload: torch.Tensor, draw: Draw) -> None:
        from shoal.comm.compress.payload import sparse_parts

        super().settle(kept, payload, draw)
        velocity = kept["velocity"]
        _, places = sparse_parts(payload, velocity.dtype)
        velocity.index_fill_(0, places.long(), 0.0)


def warm_up_fraction(fraction: float, step: int) -> float:
    """The share of elements that is sent at a step."""
    return max(fraction, WARM_UP_RATIO ** (1 + min(step // WARM_UP_STEPS, 100)))
