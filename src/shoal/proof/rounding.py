"""Whether an optimiser turns the rounding of a zero gradient into a step of full size, as one that uses the sign does.

Where the true gradient is zero (the bias of an attention key) a computed one is rounding, about 1e-17 and of any sign.
Adam divides it by its epsilon and moves by 1e-9; Rprop and sign descent move by the learning rate. What they make of
such elements depends on the order of sums alone, so there is nothing to compare.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.job import Job

ROUNDING = 1e-17
STEPS = 4


def amplifies_rounding(job: Job, *, beyond: float) -> bool:
    """Whether gradients of the size of rounding move a parameter by more than `beyond`, against gradients of zero."""
    ends = []
    with torch.random.fork_rng(devices=[]):
        for size in (0.0, ROUNDING):
            torch.manual_seed(job.seed)
            param = nn.Parameter(torch.linspace(0.1, 1.0, 12, dtype=torch.float64).view(4, 3))
            try:
                optimizer = job.optimizer([{"params": [param]}])
                for step in range(STEPS):
                    param.grad = torch.full_like(param, size * (-1) ** (step // 2))
                    optimizer.step()
            except Exception:  # It asks for more than a parameter and its gradient (LBFGS).
                return False
            ends.append(param.detach())
    return bool((ends[0] - ends[1]).abs().max() > beyond)
