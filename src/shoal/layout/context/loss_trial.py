"""Whether the loss of a sequence is the sum of the losses of its parts, found out by computing.

The traced operations show which positions a loss reads together; they do not show numbers that its code takes from
shapes (`/ output.shape[1]`, a count written as a constant). So the loss is called on random outputs of the traced
shapes: once on all positions, once on each of two parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map

from shoal.job import Batch, Job
from shoal.layout.cuts import Cut
from shoal.layout.held_outside import Outside
from shoal.layout.recorded import Ref, Trace

LossTrial = Callable[[Mapping[int, Cut], Mapping[str, int], int], str]
"""Given the cut values, the cut entries of the batch and the length: what is wrong, or nothing."""

TOLERANCE = 1e-6
"""Largest relative difference of the two sums. Targets and weights of a batch may be float32."""


def loss_trial(job: Job, trace: Trace, batch: Batch) -> LossTrial:
    """A function that judges one way of cutting. `batch`: the samples of the trace."""

    def trial(cuts: Mapping[int, Cut], entries: Mapping[str, int], length: int) -> str:
        random = torch.Generator().manual_seed(job.seed)
        drawn: dict[int, torch.Tensor] = {}
        for number in (value for value in trace.output if value is not None):
            value = trace.values[number]
            number_like = value.dtype.is_floating_point or value.dtype.is_complex
            # Logarithms and roots of outputs want positive numbers; whatever else a loss is given serves as well.
            drawn[number] = (
                torch.rand(value.shape, generator=random, dtype=torch.float64).to(value.dtype)
                if number_like
                else torch.zeros(value.shape, dtype=value.dtype)
            )

        def loss_of(start: int, stop: int) -> tuple[float, float]:
            def leaf(x: Any) -> Any:
                if not isinstance(x, Ref):
                    return x
                full = drawn[x.value]
                return _positions(full, cuts[x.value], length, start, stop) if x.value in cuts else full

            part = {
                name: entry.narrow(entries[name], start, stop - start) if name in entries else entry
                for name, entry in batch.items()
            }
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(job.seed)
                loss, count = job.loss_of(tree_map(leaf, trace.result), part)
            return float(loss), float(count)

        middle = length // 2
        if not middle:
            return ""
        try:
            outside = Outside(job)
            with outside.kept() if outside.held else nullcontext():
                (all_of, counted), *parts = (loss_of(*ends) for ends in ((0, length), (0, middle), (middle, length)))
        except Exception:  # What raises on random outputs says nothing; the gate remains.
            return ""
        losses, counts = sum(part[0] for part in parts), sum(part[1] for part in parts)
        if not _same(counts, counted):
            return f"the count of all positions is {counted:g}, of its parts {parts[0][1]:g} and {parts[1][1]:g}"
        if not _same(losses, all_of):
            return f"the loss of all positions is {all_of:.6g}, the sum of its parts {losses:.6g}"
        return ""

    return trial


def _same(one: float, other: float) -> bool:
    return not math.isfinite(one + other) or abs(one - other) <= TOLERANCE * max(abs(one), abs(other))


def _positions(x: torch.Tensor, cut: Cut, length: int, start: int, stop: int) -> torch.Tensor:
    """Some positions of a tensor whose cut dimension is (outer, positions, inner)."""
    outer, inner = len(cut.segments), cut.segments[0] // length
    wide = x.unflatten(cut.dim, (outer, length, inner))
    return wide.narrow(cut.dim + 1, start, stop - start).flatten(cut.dim, cut.dim + 2)
