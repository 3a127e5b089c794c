"""A run with parameter servers, repeated in one process from the log of its updates.

What servers do depends on who was fast, so no serial run has the same numbers. But the first server logs which
gradients made each update, and which version of the parameters each was computed with; with that the run is a plain
loop: compute each gradient at its version, average, clip, step. Nothing here is shared with the engine or the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from shoal.job import Job
from shoal.proof.islands import Islands
from shoal.proof.reference import Reference, _batch_at, _Copy, reference_of

Log = Sequence[Sequence[Sequence[int]]]
"""For each update its gradients, as (worker, step, share, version read)."""


@dataclass(frozen=True)
class Rule:
    """What an update does besides averaging."""

    rate: Callable[[float], float]
    """What the learning rate is multiplied by, from the mean staleness."""
    compensation: float


def replay(
    job: Job, log: Log, shares: Islands, rule: Rule, *, parts: int, separate: bool,
    conditions: Callable[[], AbstractContextManager[None]],
) -> tuple[Reference, dict[tuple[int, int, int], float]]:  # fmt: skip
    """The model at the end, and the loss of each gradient by (worker, step, share)."""
    copy = _Copy(replace(job, clip=None), torch.float64, conditions, None)
    params = list(copy.named.values())
    buffers = {w: [b.clone() for b in copy.model.buffers()] for w in range(shares.num)}
    counted = dict.fromkeys(range(shares.num), 0.0)
    versions = [[param.detach().clone() for param in params]]
    starts = [0]
    losses: dict[tuple[int, int, int], float] = {}
    for version, pushes in enumerate(log):
        sums: list[torch.Tensor | None] = [None] * len(params)
        total = 0.0
        for worker, step, share, read in pushes:
            while len(starts) <= step:
                starts.append(starts[-1] + len(_batch_at(job, starts[-1])))
            indices = _batch_at(job, starts[step])
            pieces = shares.share(np.arange(len(indices)), share, separate=separate, parts=parts)
            _set(params, versions[read])
            _set(copy.model.buffers(), buffers[worker])
            loss, count = copy._compute(indices, pieces, starts[step])
            buffers[worker] = [buffer.clone() for buffer in copy.model.buffers()]
            losses[worker, step, share] = loss / count
            counted[worker] += count
            total += count
            for at, param in enumerate(params):
                if param.grad is not None:
                    gradient = param.grad.to_dense()
                    moved = versions[version][at] - versions[read][at]
                    gradient = gradient + rule.compensation * gradient * gradient * moved
                    before = sums[at]
                    sums[at] = count * gradient if before is None else before + count * gradient
        _set(params, versions[version])
        for param, summed in zip(params, sums, strict=True):
            param.grad = None if summed is None else summed / total
        if job.clip is not None:
            nn.utils.clip_grad_norm_(params, job.clip)
        ages = [version - read for _, _, _, read in pushes]
        factor = job.schedule(max(step for _, step, _, _ in pushes)) * rule.rate(sum(ages) / len(ages))
        for group, lr in zip(copy.optimizer.param_groups, copy.base, strict=True):
            group["lr"] = lr * factor
        with conditions():
            copy.optimizer.step()
        versions.append([param.detach().clone() for param in params])
    everyone = sum(counted.values())
    for at, buffer in enumerate(copy.model.buffers()):
        if buffer.is_floating_point():
            buffer.copy_(sum(buffers[w][at] * (counted[w] / everyone) for w in counted))
        else:
            buffer.copy_(buffers[0][at])
    return reference_of(copy, []), losses


def _set(tensors: object, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):  # type: ignore[call-overload]
            tensor.copy_(value)
