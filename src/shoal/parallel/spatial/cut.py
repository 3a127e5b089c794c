"""Spatial parallelism: the ranks of spatial hold the same samples and different rows, or columns, of every plane.

Every rank is given full images. The first convolution of each chain computes a rank's own rows, and from there on
planes stay cut, through the loss if its operations allow. What has no plane any more (behind a global pooling) all
ranks compute alike; each then learns from its share of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shoal.layout.spatial.grid import Grid
from shoal.layout.spatial.plan import SpatialPlan
from shoal.layout.wires import Wire
from shoal.parallel.batch_norm import across, normalised
from shoal.parallel.placement import Placement
from shoal.parallel.spatial.exchange import GroupWire
from shoal.parallel.spatial.view import RankView


class PlaneCut:
    """A model whose planes are cut; made once."""

    def __init__(self, model: nn.Module, sizes: tuple[int, int], placement: Placement) -> None:
        self.grid, self.placement = Grid(sizes), placement
        self.view = RankView(GroupWire(self.grid, placement.planes), self._norm)
        self.keeps_outputs = False
        """Whether what the model gives back stays cut: the loss is then computed inside of `active`."""
        self._entered = 0
        model.forward = partial(self._forward, model.forward)  # type: ignore[method-assign]

    @contextmanager
    def active(self) -> Iterator[None]:
        """While the model, its loss or its measures are computed."""
        if self._entered:
            yield
            return
        self._entered += 1
        try:
            with self.view:
                yield
        finally:
            self._entered -= 1

    def in_full(self, tree: Any) -> Any:
        return tree_map(self.view.in_full, tree)

    def arrived(self, plan: SpatialPlan, paths: Sequence[str]) -> Callable[[int, Wire, torch.Tensor], None]:
        """Notes how a tensor is cut that a stage of a pipeline has received."""

        def note(piece: int, wire: Wire, tensor: torch.Tensor) -> None:
            self.view.mark(tensor, plan.crossing(paths, piece, wire.results, wire.arguments))

        return note

    def _forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with self.active():
            output = forward(*args, **kwargs)
        return output if self.keeps_outputs else self.in_full(output)

    def _norm(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        if kind == "batch_norm":
            assert self.placement.plane_statistics is not None
            with across(self.placement.plane_statistics):
                return func(*args, **kwargs)
        return grouped(kind, args, kwargs, self.placement.planes)


def grouped(kind: str, args: Any, kwargs: Any, members: Any) -> torch.Tensor:
    """Group norm or instance norm, by the statistics of all of a plane."""
    names = GROUP if kind == "group_norm" else INSTANCE
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = named["input"], named.get("weight"), named.get("bias")
    groups = named["num_groups"] if kind == "group_norm" else x.shape[1]
    y = normalised(x.reshape(1, x.shape[0] * groups, -1), named.get("eps", 1e-5), members).reshape(x.shape)
    shape = [1, x.shape[1], *[1] * (x.dim() - 2)]
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


GROUP = ("input", "num_groups", "weight", "bias", "eps")
INSTANCE = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
