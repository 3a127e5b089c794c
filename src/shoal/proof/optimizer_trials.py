"""What an optimiser does to one small parameter: whether two runs of it agree, and whether it amplifies rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shoal.job import Job
from shoal.job.random_optimizer import draws_numbers

ROUNDING = 1e-17
ROUNDING_STEPS = 4


def updates_compare(job: Job, *, steps: int) -> bool:
    """Whether two runs of the optimiser on the same gradients agree: not if it draws random numbers, or computes the
    loss again by itself (LBFGS)."""
    if draws_numbers(job.optimizer):
        return False  # Also from a generator of its own: ranks draw by their rule.
    gradient = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(4, 3)
    ends = [_end(job, lambda step: gradient, steps=steps, seed=seed) for seed in (1, 2)]
    return ends[0] is not None and ends[1] is not None and torch.equal(ends[0], ends[1])


def amplifies_rounding(job: Job, *, beyond: float) -> bool:
    """Whether gradients of the size of rounding move a parameter by more than `beyond`, against gradients of zero, as
    an optimiser does that uses the sign.

    Where the true gradient is zero (the bias of an attention key) a computed one is rounding, about 1e-17 and of any
    sign. Adam divides it by its epsilon and moves by 1e-9; Rprop and sign descent move by the learning rate. What they
    make of such elements depends on the order of sums alone, so there is nothing to compare.
    """

    def gradients(size: float) -> Callable[[int], torch.Tensor]:
        return lambda step: torch.full((4, 3), size * (-1) ** (step // 2), dtype=torch.float64)

    ends = [_end(job, gradients(size), steps=ROUNDING_STEPS, seed=job.seed) for size in (0.0, ROUNDING)]
    return ends[0] is not None and ends[1] is not None and bool((ends[0] - ends[1]).abs().max() > beyond)


def _end(job: Job, gradient: Callable[[int], torch.Tensor], *, steps: int, seed: int) -> torch.Tensor | None:
    """The parameter after some steps; None if the optimiser asks for more than a parameter and its gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        param = nn.Parameter(torch.linspace(0.1, 1.0, 12, dtype=torch.float64).view(4, 3))
        try:
            optimizer = job.optimizer([{"params": [param]}])
            for step in range(steps):
                param.grad = gradient(step).clone()
                optimizer.step()
        except Exception:
            return None
    return param.detach()
