"""The state of the inner optimiser in rounds of islands (`state="averaged"`): moments are averaged as parameters are.

First moments (a momentum, Adam's exp_avg) and second ones (exp_avg_sq, what Adagrad sums) may have periods of their own
(DES-LOC, arXiv 2505.22549). Which of them an optimiser keeps is found out on one small parameter, alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.job.kept import state_of
from shoal.parallel.flat_slice import FlatSlice
from shoal.parallel.runnable import NotRunnable

if TYPE_CHECKING:
    from shoal.parallel.optimizer import Recipe, SlicedOptimizer
    from shoal.parallel.sync.outer import OuterLevel

KINDS = ("m", "v")
"""First and second moments."""
SECOND = ("sq", "square", "sum", "variance")
"""Parts of the names of second moments."""
SIZE = 8


def kind_of(key: str) -> str:
    return "v" if any(part in key for part in SECOND) else "m"


def moments_of(recipe: Recipe) -> Mapping[str, Sequence[str]]:
    """The names of the moments that an optimiser keeps, by kind."""
    param = nn.Parameter(torch.zeros(SIZE))
    optimizer = recipe.factory([{"params": [param], **(recipe.options[0] if recipe.options else {})}])
    param.grad = torch.ones(SIZE)
    optimizer.step()
    keys = [
        key
        for key, value in state_of(optimizer, param).items()
        if isinstance(value, torch.Tensor) and value.numel() == SIZE and value.is_floating_point()
    ]
    return {kind: sorted(key for key in keys if kind_of(key) == kind) for kind in KINDS}


class Moments:
    """Those of one rank's slices."""

    def __init__(self, level: OuterLevel, recipe: Recipe, optimizer: Callable[[], SlicedOptimizer]) -> None:
        if not recipe.elementwise:
            raise NotRunnable(
                f'{level.term}: state="averaged" averages moments element by element, and this optimiser has state of '
                'full parameters; use state="local"'
            )
        self.level, self.optimizer, self.keys = level, optimizer, moments_of(recipe)

    @property
    def counts(self) -> tuple[int, int]:
        """How many first and second moments there are."""
        return len(self.keys["m"]), len(self.keys["v"])

    def average(self, kinds: Sequence[str], count: float) -> None:
        """Moments of these kinds become their mean over islands, weighted by what each learned from. One that is lost
        meanwhile is left out. Collective over islands."""
        keys = [key for kind in kinds for key in self.keys[kind]]
        if not keys or self.level.islands.size == 1:
            return
        for flat, views in self.level.together(lambda: self._mean(keys, count)):
            for where, view in views:
                view.copy_(flat[where].view(view.shape))

    def _mean(self, keys: Sequence[str], count: float) -> list[tuple[torch.Tensor, list[tuple[slice, torch.Tensor]]]]:
        group = self.level.islands.group
        total: Any = torch.tensor([count], dtype=torch.float64, device=self.level.device)
        found = [each for key in keys for each in self._laid_flat(key)]
        works = [dist.all_reduce(flat.mul_(count), group=group, async_op=True) for flat, _ in found]
        dist.all_reduce(total, group=group)
        for work in works:
            work.wait()
        for flat, _ in found:
            flat.div_(float(total))
        return found

    def _laid_flat(self, key: str) -> Iterator[tuple[torch.Tensor, list[tuple[slice, torch.Tensor]]]]:
        """A moment of each bucket, laid out as its master is, and where its parts lie. What has none yet has zeros."""
        optimizer = self.optimizer()
        for bucket in self.level.buckets:
            flat = torch.zeros_like(bucket.master, dtype=torch.promote_types(bucket.master.dtype, torch.float32))
            views = []
            for part in optimizer.slices:
                value = state_of(optimizer.optimizer, part.param).get(key)
                if isinstance(part, FlatSlice) and part.bucket is bucket and value is not None:
                    where = slice(part.start - bucket.offset, part.stop - bucket.offset)
                    flat[where] = value.reshape(-1)
                    views.append((where, value))
            yield flat, views
