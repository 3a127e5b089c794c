"""The model that the gate steps with: the job's own, changed so that nothing can hide a fault.

Nothing is dropped at random. Every trainable parameter is moved a little, and what starts at zero (adaLN-zero, B of
LoRA, residual gains) gets other values: behind a zero, no gradient would show what is wrong. Buffers that
replicas need not agree on start every forward from the same values. All models built here start alike, whatever their
code draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.job import Job
from shoal.job.buffers import EXACT, buffer_modes
from shoal.proof.undropped import without_dropout

SPREAD = 0.1
"""Largest relative change of an element. Its sign stays: what must be positive still is."""
FROM_ZERO = 0.1
"""Largest value of an element that was zero, of a tensor of zeros: divided by the root of a unit's inputs."""


def gate_model(job: Job) -> Callable[[], nn.Module]:
    """A function that builds the job's model as the gate steps with it."""
    first: dict[str, torch.Tensor] = {}

    def build() -> nn.Module:
        model = without_dropout(job.model())
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            if first:
                for name, tensor in held.items():
                    tensor.copy_(first[name])
            else:
                for name, param in model.named_parameters():
                    if param.requires_grad and param.numel():
                        perturb(name, param)
                first.update({name: tensor.detach().clone() for name, tensor in held.items()})
        modes = buffer_modes(job.buffers, model)
        inexact = [name for name, mode in modes.items() if mode not in EXACT]
        if inexact:
            model.register_forward_pre_hook(_from_the_start({name: first[name] for name in inexact}))
        return model

    return build


def perturb(name: str, param: torch.Tensor) -> None:
    """Moves a parameter a little, by its name alone: the same on every rank, whatever was drawn before."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.rand(param.shape, generator=generator, dtype=torch.float64).to(param.device)
    size = float(param.detach().abs().square().mean().sqrt())
    unit = param.numel() // max(1, param.shape[0]) if param.dim() > 1 else 1
    from_zero = SPREAD * size if size else FROM_ZERO / unit**0.5
    moved = param.detach() * (1 + SPREAD * (2 * drawn - 1))
    param.copy_(torch.where(param == 0, from_zero * (0.5 + 0.5 * drawn), moved).to(param.dtype))


def _from_the_start(values: dict[str, torch.Tensor]) -> Callable[[nn.Module, Any], None]:
    """Before each forward, these buffers are as they were when the model was built."""

    def reset(model: nn.Module, args: Any) -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in values:
                    start = values[name].to(buffer.device, buffer.dtype)
                    # Left alone where nothing has changed: autograd may still need it as it is.
                    if buffer.shape == start.shape and not torch.equal(buffer, start):
                        buffer.copy_(start)

    return reset
