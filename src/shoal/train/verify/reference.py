"""The serial run that proofs compare with: plain PyTorch, one process, none of the engine's code.

It trains on the same global batches, micro-batch by micro-batch, with the library's own clipping and the job's own
optimiser on whole parameters. It also watches each element's gradient: where the true gradient is zero (the bias of
an attention key, a bias before batch norm) what is left is rounding, and Adam divides rounding by its epsilon. Such
elements are marked, so that a proof can say what it did with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.job import Job, param_groups, share
from shoal.parallel.pipeline.pipedream import micros_told
from shoal.train.step import build_model, cast, draw_from, seed_at

ROUNDING = 1e-12
"""A gradient that never exceeds this fraction of the largest gradient in the model is taken for rounding of a zero."""


@dataclass
class Reference:
    """Where the serial run ended, and how it got there."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    """Parameter -> state key -> tensor of the parameter's shape."""
    buffers: dict[str, torch.Tensor]
    rounding: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameter -> mask of the elements whose true gradient is zero."""


def train_serially(
    job: Job, *, steps: int, micro_batches: int, parts: int = 1, dtype: torch.dtype | None = torch.float64,
    unflushed_ranks: int = 0,
) -> Reference:  # fmt: skip
    """`parts` cuts each micro-batch further, as ranks would: needed only for dropout, whose masks are drawn by part.
    `unflushed_ranks`: the length of a PipeDream to compare with; the optimiser then steps after every micro-batch, and
    a step's loss is of the micro-batches whose loss such a pipeline tells in it. Staleness alone is left to differ."""
    model = build_model(job, dtype)
    model.train()
    optimizer = job.optimizer(param_groups(model, job.options))
    base = [group["lr"] for group in optimizer.param_groups]
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    largest = {name: torch.zeros_like(param) for name, param in named.items()}
    order, counter = job.order(), 0
    sums: list[tuple[float, float]] = []
    """Of the losses that lead to one update each, and how many they are."""
    per_step = micro_batches if unflushed_ranks else 1
    for update in range(steps * per_step):
        step, micro = divmod(update, per_step)
        indices = order.indices(counter)
        total, count = 0.0, 0.0
        optimizer.zero_grad(set_to_none=True)
        for positions in _cut(len(indices), micro_batches, parts, only=micro if unflushed_ranks else None):
            draw_from(seed_at(job.seed, counter + int(positions[0])))
            batch = cast(job.train.batch(indices[positions]), dtype)
            loss, counted = job.loss(job.run_model(model, batch), batch)
            loss.backward()
            total, count = total + float(loss.detach()), count + float(counted)
        sums.append((total, count))
        if micro == per_step - 1:
            counter = order.next(counter)
        if unflushed_ranks and not count:
            continue
        gradients = [param.grad for param in named.values() if param.grad is not None]
        for gradient in gradients:
            gradient.div_(count)
        for name, param in named.items():
            if param.grad is not None:
                torch.maximum(largest[name], param.grad.to_dense().abs(), out=largest[name])
        if job.clip is not None:
            nn.utils.clip_grad_norm_(named.values(), job.clip)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * job.schedule(step)
        optimizer.step()
    top = max((float(peak.max()) for peak in largest.values() if peak.numel()), default=0.0)
    keys = {key for param in named.values() for key in _elementwise_state(optimizer, param)}
    return Reference(
        losses=_by_step(sums, steps, micro_batches, unflushed_ranks),
        parameters={name: param.detach() for name, param in named.items()},
        state={name: _elementwise_state(optimizer, param, keys) for name, param in named.items()},
        buffers=dict(model.named_buffers()),
        rounding={name: (peak > 0) & (peak <= ROUNDING * top) for name, peak in largest.items()},
    )


def _by_step(sums: list[tuple[float, float]], steps: int, micro_batches: int, unflushed_ranks: int) -> list[float]:
    """The mean loss of each step."""
    ends = [
        micros_told(ranks=unflushed_ranks, micro=micro_batches, steps=step) if unflushed_ranks else step
        for step in range(steps + 1)
    ]
    told = [sums[start:stop] for start, stop in pairwise(ends)]
    return [sum(total for total, _ in rows) / sum(count for _, count in rows) for rows in told]


def _cut(samples: int, micro_batches: int, parts: int, *, only: int | None = None) -> list[np.ndarray]:
    """The samples of all micro-batches, or of only one."""
    positions = np.arange(samples)
    pieces = [
        share(positions, rank=part, ranks=parts, micro=micro, micros=micro_batches)
        for micro in (range(micro_batches) if only is None else [only])
        for part in range(parts)
    ]
    return [piece for piece in pieces if len(piece)]


def _elementwise_state(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, keys: set[str] | None = None
) -> dict[str, torch.Tensor]:
    """State with a value for each element. Of a scalar parameter only `keys` tell it from a number such as the step."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    return {
        k: v
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and v.numel() == param.numel() and (v.dim() > 0 or (keys and k in keys))
    }
