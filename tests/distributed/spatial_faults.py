"""Wrong spatial parallelism, planted on purpose: runs of `verify` with one step changed on every rank. What is sent
stays as it is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from shoal.parallel.spatial import cut, exchange, view
from shoal.proof.entry import parallel_run


def shortens_halos(arguments: dict[str, Any], channel: Any) -> Any:
    """The last row that is fetched counts as padding, on the first rank."""
    honest = exchange.moved

    def faulty(x: torch.Tensor, move: Any, wire: Any, *beyond: Any) -> torch.Tensor:
        out, need = honest(x, move, wire, *beyond), move.needs[0]
        if need is None or not need.held or not move.travels(wire.grid):
            return out
        kept = torch.ones(out.shape[need.cut.dim], dtype=out.dtype)
        kept[-1] = wire.index
        return out * kept.view([-1 if dim == need.cut.dim else 1 for dim in range(out.dim())])

    view.moved = faulty  # type: ignore[attr-defined]
    return parallel_run(arguments, channel)


def drops_gradients_of_halos(arguments: dict[str, Any], channel: Any) -> Any:
    """Backward keeps the gradient of a rank's own rows only."""
    honest = exchange.give_back

    def faulty(gradient: Any, total: Any, have: Any, need: Any, move: Any, wire: Any, dims: Any) -> None:
        honest(gradient, torch.zeros_like(total), have, need, move, wire, dims)
        own = exchange.common(have, need)
        exchange.inside(total, own, have, dims).copy_(exchange.inside(gradient, own, need, dims))

    exchange.give_back = faulty
    return parallel_run(arguments, channel)


def keeps_statistics_apart(arguments: dict[str, Any], channel: Any) -> Any:
    """Batch norm takes the statistics of a rank's own rows."""
    cut.across = lambda members: nullcontext()  # type: ignore[assignment]
    return parallel_run(arguments, channel)
