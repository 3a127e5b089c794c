"""What some optimisers need in a step besides gradients: the loss computed again, or a place for each random number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shoal.job.elementwise import sums_over_ranks
from shoal.job.random_optimizer import ParameterRange

if TYPE_CHECKING:
    from shoal.parallel.engine import Engine


def closure_for(engine: Engine, again: Callable[[], None] | None, loss: float) -> Callable[[], torch.Tensor]:
    """For an optimiser like LBFGS: gives loss and gradients at the present parameters. What was just computed (`loss`)
    serves as long as they are the same; then `again` computes all micro-batches of the step once more."""
    if again is None:
        raise ValueError(
            f"{type(engine.optimizer.optimizer).__name__} computes the loss several times in a step, and step() "
            "was not given the function to do so; pass engine.step(again=...), or train a Job"
        )
    before = [master.clone() for master in engine.owner.masters]

    def closure() -> torch.Tensor:
        if before and all(map(torch.equal, before, engine.owner.masters)):
            before.clear()
            return torch.tensor(loss, dtype=torch.float64)
        before.clear()
        engine.reduction.clear()
        engine.owner.publish()  # What it has changed on this rank, the next forward reads on all.
        with torch.enable_grad():
            again()
        fresh, gradients = engine.reduce()
        engine.optimizer.give(gradients.unused)
        return torch.tensor(fresh.loss, dtype=torch.float64)

    return closure


def sum_over_ranks(engine: Engine) -> None:
    """For an optimiser that computes with vectors over all parameters: its numbers are those of all ranks."""
    optimizer: Any = engine.optimizer.optimizer
    if not sums_over_ranks(optimizer):
        return
    over = engine.placement.norm

    def of_all(value: torch.Tensor, how: str) -> torch.Tensor:
        if over.group is not None:
            dist.all_reduce(value, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=over.group)
        return value

    optimizer.over_ranks = of_all


def drawn_slices(engine: Engine) -> Iterator[tuple[torch.Tensor, list[ParameterRange]]]:
    """For each tensor of the optimiser, which elements of which parameters it draws random numbers for."""
    for param, pieces in engine.optimizer.contents():
        stretches = []
        for at, piece in pieces:
            part = engine.part_of_piece(piece)
            full, held = engine.shapes[piece.name][0], None if part is None else part.of
            stretches.append(ParameterRange(piece.name, full, held, piece.start, piece.values.numel(), at))
        yield param, stretches
