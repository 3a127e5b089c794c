"""The serial steps that the gate compares with: plain PyTorch in one process, in float64.

The job's own optimiser steps on unsharded parameters. The batch is taken at once, as one process would; it is taken in
micro-batches only where the contract says so: batch norm, state that a forward changes, a loss over micro-batches.
What the model draws at random other than dropout is drawn as on the ranks, by sample and place (`runtime/draws.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from shoal.job import Job, param_groups, share
from shoal.job.facts import has_batch_norm
from shoal.proof.rounding import move_by_rounding
from shoal.runtime.draws import serial_randomness
from shoal.runtime.float64 import to_float64
from shoal.strategy import Strategy

STEPS = 2
"""The first shows the gradients, the second what the optimiser's state does."""
FACTORS = (0.5, 1.0)
"""On the learning rate of each step: different, so that a rate that is scaled twice shows."""
UNSURE = 1e-9
"""Elements whose gradient is at most this fraction of the model's largest on both sides, but not zero on both, are left
out where updates are compared: it may be rounding of a zero, and optimisers divide by its size."""


@dataclass
class SerialSteps:
    """What the steps gave."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the first step, as the optimiser got them: means, clipped."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the first step."""
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters before the first step and after the last."""
    peaks: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameter -> the largest gradient of each element, over the steps."""
    limit: float = 0.0
    """Gradients up to this may be rounding of a zero."""


def serial_steps(
    job: Job, strategy: Strategy, model: nn.Module, *, has_state: bool, steps: int = STEPS, disturbed: int = 0
) -> SerialSteps:
    """Steps the job's model, which is in float64, in this process, on the batches of its order. `has_state`: whether a
    forward changes what modules hold, which each micro-batch then does. What is drawn at random is what the ranks draw.
    `disturbed`: the seed of another rounding of the same numbers, or 0.

    Raises:
        CannotPlace: It draws what ranks cannot draw alike.
    """
    model.train()
    optimizer = job.optimizer(param_groups(model, job.options))
    rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    peaks = {name: torch.zeros(param.shape, dtype=torch.float64) for name, param in named.items()}
    micros, parts = _cuts(job, strategy, per_micro=has_state or has_batch_norm(model))
    randomness = serial_randomness(job, model, torch.float64)
    order, counter = job.order(), 0
    noise = torch.Generator().manual_seed(disturbed) if disturbed else None
    # Where a forward changes state or the loss is one over the batch, the order of samples may mean something.
    reverse = disturbed and not has_state and job.loss_over == "samples"
    found = SerialSteps(before={name: param.detach().clone() for name, param in named.items()})
    for step in range(steps):
        indices = order.indices(counter)
        optimizer.zero_grad(set_to_none=True)
        total, count = 0.0, 0.0
        if noise is not None:
            move_by_rounding(named.values(), noise)
        for piece in _pieces(len(indices), micros, parts):
            positions = piece[::-1] if reverse else piece
            batch = {name: to_float64(entry) for name, entry in job.train.batch(indices[positions]).items()}
            with randomness.forward([counter + int(position) for position in positions], counter):
                loss, counted = job.loss_of(job.run_model(model, batch), batch)
            if loss.requires_grad:
                with randomness.backward():
                    loss.backward()
            total, count = total + float(loss.detach()), count + float(counted)
        found.losses.append(total / count if count else float("nan"))
        with torch.no_grad():
            for param in named.values():
                if param.grad is not None:
                    param.grad = param.grad.to_dense() / count
        if job.clip is not None:
            nn.utils.clip_grad_norm_(named.values(), job.clip)
        for name, param in named.items():
            if param.grad is not None:
                torch.maximum(peaks[name], param.grad.abs(), out=peaks[name])
                if step == 0:
                    found.gradients[name] = param.grad.clone()
        if step == 0:
            found.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        if steps < STEPS:
            break  # What the optimiser does is not compared.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"] = torch.full_like(group["lr"], rate * FACTORS[step])
            elif "lr" in group:
                group["lr"] = rate * FACTORS[step]
        optimizer.step()
        counter = order.next(counter)
    top = max((float(peak.max()) for peak in peaks.values() if peak.numel()), default=0.0)
    found.after = {name: param.detach() for name, param in named.items()}
    found.peaks, found.limit = peaks, UNSURE * top
    return found


def _cuts(job: Job, strategy: Strategy, *, per_micro: bool) -> tuple[int, int]:
    """Into how many micro-batches, and each of them into how many parts, the contract cuts a batch."""
    if job.loss_over == "micro-batch":
        return strategy.micro_batches, strategy.replicas
    return (strategy.micro_batches if per_micro else 1), 1


def _pieces(samples: int, micros: int, parts: int) -> list[np.ndarray]:
    positions = np.arange(samples)
    pieces = [
        share(positions, rank=part, ranks=parts, micro=micro, micros=micros)
        for micro in range(micros)
        for part in range(parts)
    ]
    return [piece for piece in pieces if len(piece)]
