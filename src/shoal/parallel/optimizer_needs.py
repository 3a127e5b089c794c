"""What some optimisers need in a step besides gradients: the loss computed again, or a place for each random number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

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
        with torch.enable_grad():
            again()
        fresh, gradients = engine.reduce()
        engine.optimizer.give(gradients.unused)
        return torch.tensor(fresh.loss, dtype=torch.float64)

    return closure


def drawn_slices(engine: Engine) -> Iterator[tuple[torch.Tensor, list[ParameterRange]]]:
    """For each tensor of the optimiser, which elements of which parameters it draws random numbers for."""
    for param, pieces in engine.optimizer.contents():
        stretches = []
        for at, piece in pieces:
            part = engine.part_of_piece(piece)
            full, held = engine.shapes[piece.name][0], None if part is None else part.of
            stretches.append(ParameterRange(piece.name, full, held, piece.start, piece.values.numel(), at))
        yield param, stretches
