"""A run with parameter servers, repeated in one process from the log of its updates.

What servers do depends on who was fast, so no serial run has the same numbers. But the first server logs which
gradients made each update, and which version of the parameters each was computed with; with that the run is a plain
loop: compute each gradient at its version, average, clip, step. Nothing here is shared with the engine or the servers.
A worker's gradients are computed in its own order, also those that were dropped: they change its buffers, and what it
keeps of compressed pushes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shoal.job import Job
from shoal.proof.islands import Islands
from shoal.proof.reference import Reference, _batch_at, _Copy, _groups, reference_of

Log = Sequence[Sequence[Sequence[int]]]
"""For each update its gradients, as (worker, step, share, version read, number of the worker's push)."""
Sends = Callable[[int, int, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""What of a mean gradient a worker sends in its push of a number."""


@dataclass(frozen=True)
class ServerRule:
    """What an update does besides averaging."""

    rate: Callable[[float], float]
    """What the learning rate is multiplied by, from the mean staleness."""
    compensation: float


class _Computed(NamedTuple):
    gradients: dict[str, torch.Tensor]
    samples: float


class _Workers:
    """The gradients of all workers, each computed once, in the order of its pushes."""

    def __init__(self, job: Job, copy: _Copy, rows: Sequence[Sequence[int]], compute: Any, sends: Sends | None) -> None:
        self.copy, self.compute, self.sends = copy, compute, sends
        self.rows = {row[0]: sorted((r for r in rows if r[0] == row[0]), key=lambda r: r[4]) for row in rows}
        self.found: dict[tuple[int, int], _Computed] = {}
        self.losses: dict[tuple[int, int, int], float] = {}
        self.last: dict[int, float] = {}
        """Of each worker's last share of which something counted."""

    def upto(self, worker: int, number: float) -> None:
        """Computes the pushes of a worker up to one."""
        while self.rows.get(worker) and self.rows[worker][0][4] <= number:
            row = self.rows[worker].pop(0)
            loss, count = self.compute(row)
            self.last[worker] = loss / count if count else self.last.get(worker, 0.0)
            self.losses[row[0], row[1], row[2]] = self.last[worker]
            named = self.copy.named.items()
            gradients = {name: p.grad.to_dense().clone() for name, p in named if p.grad is not None}
            if self.sends is not None:
                gradients = self.sends(worker, row[4], gradients)
            self.found[worker, row[4]] = _Computed(gradients, count)

    def take(self, worker: int, number: int) -> _Computed:
        self.upto(worker, number)
        return self.found.pop((worker, number))


def replay(
    job: Job,
    log: Log,
    shares: Islands,
    rule: ServerRule,
    *,
    parts: int,
    separate: bool,
    conditions: Callable[[], AbstractContextManager[None]],
    dropped: Sequence[Sequence[int]] = (),
    sends: Sends | None = None,
    own_state: bool = False,
) -> tuple[Reference, dict[tuple[int, int, int], float]]:
    """The model at the end, and the loss of each gradient by (worker, step, share). `dropped`: gradients that were
    computed and not used; `sends`: where workers compress; `own_state`: each worker has an optimiser of its own, and an
    update is one worker's."""
    copy = _Copy(replace(job, clip=None), torch.float64, conditions, None)
    params = list(copy.named.values())
    buffers = {w: [b.clone() for b in copy.model.buffers()] for w in range(shares.num)}
    counted = dict.fromkeys(range(shares.num), 0.0)
    optimizers = {w: job.optimizer(_groups(job, copy.model)) for w in range(1, shares.num) if own_state}
    optimizers[0] = copy.optimizer
    versions = [[param.detach().clone() for param in params]]
    starts = [0]

    def compute(row: Sequence[int]) -> tuple[float, float]:
        worker, step, share, read, _ = row
        while len(starts) <= step:
            starts.append(starts[-1] + len(_batch_at(job, starts[-1])))
        indices = _batch_at(job, starts[step])
        pieces = shares.share(np.arange(len(indices)), share, separate=separate, parts=parts)
        _set(params, versions[read])
        _set(copy.model.buffers(), buffers[worker])
        loss, count = copy._compute(indices, pieces, starts[step])
        buffers[worker] = [buffer.clone() for buffer in copy.model.buffers()]
        counted[worker] += count
        return loss, count

    workers = _Workers(job, copy, [*(row for pushes in log for row in pushes), *dropped], compute, sends)
    for version, pushes in enumerate(log):
        sums: dict[str, torch.Tensor] = {}
        total = 0.0
        for worker, _, _, read, number in pushes:
            gradients, count = workers.take(worker, number)
            total += count
            for at, name in enumerate(copy.named):
                if name in gradients:
                    gradient = gradients[name]
                    moved = versions[version][at] - versions[read][at]
                    gradient = gradient + rule.compensation * gradient * gradient * moved
                    sums[name] = count * gradient if name not in sums else sums[name] + count * gradient
        _set(params, versions[version])
        for name, param in copy.named.items():
            param.grad = sums[name] / (total or 1.0) if name in sums else None
        if job.clip is not None:
            nn.utils.clip_grad_norm_(params, job.clip)
        ages = [version - row[3] for row in pushes]
        factor = job.schedule(max(row[1] for row in pushes)) * rule.rate(sum(ages) / len(ages))
        optimizer = optimizers[pushes[0][0] if own_state else 0]
        for group, lr in zip(optimizer.param_groups, copy.base, strict=True):
            group["lr"] = lr * factor
        with conditions():
            if total:
                optimizer.step()
        versions.append([param.detach().clone() for param in params])
    for worker in range(shares.num):
        workers.upto(worker, float("inf"))
    _set(params, versions[-1])
    everyone = sum(counted.values())
    for at, buffer in enumerate(copy.model.buffers()):
        if buffer.is_floating_point():
            buffer.copy_(sum(buffers[w][at] * (counted[w] / everyone) for w in counted))
        else:
            buffer.copy_(buffers[0][at])
    return reference_of(copy, []), workers.losses


def _set(tensors: object, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):  # type: ignore[call-overload]
            tensor.copy_(value)
