"""A loss over the global batch under data parallelism: every rank computes it from the outputs of all ranks.

The model's outputs are gathered over the ranks that share a batch; the samples are read by each rank, so the loss
sees the very batch that one process would have. All ranks compute the same loss and count it once. Backward needs
no messages: the gradient of a gathered output is the same everywhere, and each rank goes on with its own rows. An
output without samples (a temperature) is each rank's own copy, whose gradients are summed later: each takes a part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from shoal.comm.mesh import Members
from shoal.layout.crossings import Crossing, Tally
from shoal.parallel.collectives import gather_whole


class OutputNotGathered(ValueError):
    """An output of the model does not show which samples it is of."""


class GlobalLoss:
    """Gathers outputs over `samples`, and keeps account of what that sends."""

    def __init__(self, samples: Members) -> None:
        self.samples = samples
        self.crossings = Tally()

    @property
    def counts(self) -> bool:
        """Whether this rank is the one whose loss counts."""
        return self.samples.index == 0

    def gathered(self, output: Any, *, mine: int, total: int) -> Any:
        """The output of the global batch of `total` samples, of which this rank computed `mine` (or, having none, a
        placeholder that is dropped)."""
        return tree_map(lambda leaf: self._gathered(leaf, mine, total), output)

    def _gathered(self, leaf: Any, mine: int, total: int) -> Any:
        size = self.samples.size
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, (str, bytes, bool, int, float, type(None))):
                return leaf
            raise OutputNotGathered(
                f'loss_over="batch" gathers the model\'s outputs, but one is a {type(leaf).__name__}, which cannot be '
                "looked into; return tensors, tuples, lists or dictionaries of them"
            )
        if not leaf.dim():
            return _Shared.apply(leaf, size) if leaf.requires_grad else leaf
        if leaf.size(0) != max(mine, 1):
            raise OutputNotGathered(
                f'loss_over="batch" gathers the model\'s outputs, but one of shape {list(leaf.shape)} does not have '
                f"the {max(mine, 1)} samples first; return tensors with the samples first, or numbers"
            )
        rows = leaf[:mine]
        longest = -(-total // size)
        numel = leaf[:1].numel() * longest * size
        learns = torch.is_grad_enabled() and leaf.requires_grad
        self.crossings.note(Crossing(how="gather_whole", whole_bytes=numel * leaf.element_size(), gradient=learns))
        return gather_whole(rows, self.samples, 0, total)


class _Shared(torch.autograd.Function):
    """The identity; all ranks give back the same gradient, of which each takes an equal part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / ctx.ranks, None
