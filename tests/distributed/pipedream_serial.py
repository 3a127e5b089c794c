"""PipeDream in one process, written from its definition and sharing nothing with the executor.

All versions of all weights are kept. Micro-batch i runs forward and backward through the whole model at once, with
stage s at the version it had when n - 1 - s micro-batches before i had been applied; its gradient then makes version
i + 1 of every stage out of version i. That is all there is to a pipeline without flush, seen without time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shoal.job import Job, param_groups, share
from shoal.layout.layout import layout_of
from shoal.runtime.step import build_model, cast, seed_at
from shoal.strategy import Strategy, pp


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Where it ended, and how it got there."""

    parameters: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    losses: list[tuple[float, float]]
    """(sum, count) of each micro-batch."""


def stages_of(job: Job, strategy: Strategy) -> dict[str, int]:
    """Parameter -> stage."""
    layout, term = layout_of(job, strategy), strategy.term(pp)
    assert term is not None
    assert layout.chain is not None
    found = {}
    for stage, (first, stop) in enumerate(layout.stages(term.n)):
        for link in layout.chain.links[first:stop]:
            found |= {name: stage for name in link.parameters}
    return found


def simulate(job: Job, strategy: Strategy, *, steps: int, drained_after: frozenset[int] = frozenset()) -> Simulated:
    """`drained_after`: steps (counted from 1) after which the pipeline ran empty."""
    term = strategy.term(pp)
    assert term is not None
    where = stages_of(job, strategy)
    model = build_model(job, torch.float64)
    model.train()
    optimizer = job.optimizer(param_groups(model, job.options))
    rates = [group["lr"] for group in optimizer.param_groups]
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    versions = [{name: param.detach().clone() for name, param in named.items()}]
    """After so many micro-batches."""
    moves: list[dict[str, torch.Tensor] | None] = [None]
    """What the update before each version did."""
    order, counter, start = job.order(), 0, 0
    losses: list[tuple[float, float]] = []
    for micro_of_all in range(steps * term.micro):
        step, micro = divmod(micro_of_all, term.micro)
        if micro == 0 and step in drained_after:
            start, moves[-1] = micro_of_all, None
        indices = order.indices(counter)
        positions = share(np.arange(len(indices)), rank=0, ranks=1, micro=micro, micros=term.micro)
        for name, param in named.items():
            late = term.n - 1 - where.get(name, 0)
            seen = max(start, micro_of_all - late)
            param.data = versions[seen][name].clone()
            move = moves[seen]
            if term.predict and move is not None:
                param.data += min(micro_of_all - start, late) * move[name]
            param.grad = None
        count = 0.0
        if len(positions):
            torch.manual_seed(seed_at(job.seed, counter + int(positions[0])))
            batch = cast(job.train.batch(indices[positions]), torch.float64)
            loss, counted = job.loss(job.run_model(model, batch), batch)
            count = float(counted)
            loss.backward()
        losses.append((float(loss.detach()) if len(positions) else 0.0, count))
        if micro == term.micro - 1:
            counter = order.next(counter)
        for name, param in named.items():
            param.data = versions[-1][name].clone()
        if not count:
            versions.append(versions[-1])
            moves.append(moves[-1])
            continue
        for param in named.values():
            if param.grad is not None:
                param.grad /= count
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(named.values(), job.clip)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.schedule(step)
        optimizer.step()
        versions.append({name: param.detach().clone() for name, param in named.items()})
        moves.append({name: versions[-1][name] - versions[-2][name] for name in named})
    state = {
        name: {key: value for key, value in optimizer.state.get(param, {}).items() if value.numel() == param.numel()}
        for name, param in named.items()
    }
    return Simulated(parameters=versions[-1], state=state, buffers=dict(model.named_buffers()), losses=losses)
