"""Does an optimiser treat every element of a parameter alone? Only then may a parameter be cut anywhere and
its pieces be stepped apart. Names do not tell (a wrapper may hide anything), so it is tried: one small
matrix is trained whole, and the same numbers as two flat pieces. SGD, Adam and their kin agree to the bit;
LAMB, LARS, Adafactor and Muon look at a parameter's norm, rows or shape, and do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

STEPS = 3
TOLERANCE = 1e-12
SHAPE = (6, 5)
CUT_AT = 13  # within a row: neither piece is a block of rows


def elementwise(optimizer: OptimizerFactory) -> bool:
    """Whether pieces of a parameter may be stepped apart. False also where flat pieces are refused."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    # Gradients of very different sizes in the two pieces: anything normalised over a whole parameter shows.
    scale = torch.linspace(0.01, 3.0, start.numel(), dtype=torch.float64).reshape(SHAPE)
    gradients = [torch.randn(SHAPE, generator=generator, dtype=torch.float64) * scale for _ in range(STEPS)]

    whole = torch.nn.Parameter(start.clone())
    # An optimiser that cannot take this matrix at all has a fault of its own: that error belongs to the user.
    _train(optimizer, [whole], [[gradient] for gradient in gradients])
    flat = start.flatten()
    pieces = [torch.nn.Parameter(flat[:CUT_AT].clone()), torch.nn.Parameter(flat[CUT_AT:].clone())]
    try:
        _train(optimizer, pieces, [[g.flatten()[:CUT_AT], g.flatten()[CUT_AT:]] for g in gradients])
    except (ValueError, RuntimeError, IndexError, TypeError, AssertionError):
        return False
    joined = torch.cat([piece.detach() for piece in pieces]).reshape(SHAPE)
    return bool(torch.allclose(joined, whole.detach(), rtol=TOLERANCE, atol=TOLERANCE))


def _train(optimizer: OptimizerFactory, parameters: list[torch.nn.Parameter], gradients: list[list[Tensor]]) -> None:
    running = optimizer([{"params": parameters}])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        running.step()
