"""One forward and backward of some samples, and how two of them compare: what adds up, what is an average."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

TOLERANCE = 1e-8
"""Largest relative difference of independent samples. They measure 1e-13; a coupling of interest 1e-6 and more."""
SMALLEST = 1e-4
"""A gradient is compared by the size of its tensor's largest element, or by this part of the model's largest."""


@dataclass(frozen=True)
class SamplePass:
    """One forward and backward."""

    loss: float
    count: float
    gradients: dict[str, torch.Tensor]
    output: Any
    norms: tuple[tuple[str, int], ...] = ()
    """Calls of batch norm: the module, and how many elements it was given."""


def sum_of(one: SamplePass, two: SamplePass) -> SamplePass:
    gradients = {
        name: sum(part.gradients[name] for part in (one, two) if name in part.gradients)
        for name in one.gradients.keys() | two.gradients.keys()
    }
    return SamplePass(one.loss + two.loss, one.count + two.count, gradients, None)  # type: ignore[arg-type]


def over_count(found: SamplePass) -> SamplePass:
    by = found.count or 1.0
    return SamplePass(found.loss / by, 1.0, {name: value / by for name, value in found.gradients.items()}, None)


def difference(one: SamplePass, other: SamplePass) -> float:
    """The largest relative difference of loss, count and gradients. A parameter without a gradient has one of zero."""
    rows = [
        abs(one.loss - other.loss) / max(abs(one.loss), abs(other.loss), 1e-300),
        abs(one.count - other.count) / max(abs(one.count), abs(other.count), 1e-300),
    ]
    every = [*one.gradients.values(), *other.gradients.values()]
    least = SMALLEST * max((float(g.abs().max()) for g in every if g.numel()), default=0.0)
    for name in one.gradients.keys() | other.gradients.keys():
        known = one.gradients[name] if name in one.gradients else other.gradients[name]
        if known.numel():
            a, b = (found.gradients.get(name, torch.zeros_like(known)) for found in (one, other))
            rows.append(float((a - b).abs().max()) / (max(float(a.abs().max()), least) or 1.0))
    return max(math.inf if math.isnan(row) else row for row in rows)


def is_average(full: SamplePass, one: SamplePass, two: SamplePass) -> bool:
    """Whether full = a * one + (1 - a) * two for one a between 0 and 1, in the loss and in every gradient."""
    names = full.gradients.keys() | one.gradients.keys() | two.gradients.keys()

    def flat(found: SamplePass) -> torch.Tensor:
        known = {**two.gradients, **one.gradients, **full.gradients}
        rows = [torch.tensor([found.loss], dtype=torch.float64)]
        for name in sorted(names):
            value = found.gradients.get(name, torch.zeros_like(known[name]))
            rows.append((torch.view_as_real(value) if value.is_complex() else value).reshape(-1))
        return torch.cat(rows)

    x, y, z = flat(full), flat(one), flat(two)
    across = float((y - z).square().sum())
    if not across:
        return False
    a = float(((x - z) * (y - z)).sum()) / across
    return 0.0 < a < 1.0 and float((x - z - a * (y - z)).norm()) <= TOLERANCE * float(x.norm() + y.norm() + z.norm())


def detached(output: Any) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(output)]


def outputs_differ(full: list[Any], one: list[Any], two: list[Any]) -> str:
    """How the outputs of a batch differ from those of its parts laid end to end; empty if they do not."""
    for number, leaves in enumerate(zip(full, one, two, strict=False)):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            if isinstance(leaves[0], (str, bytes, bool, int, float, type(None))):
                continue
            return f"an output is a {type(leaves[0]).__name__}, which cannot be looked into"
        a, b, c = leaves
        which = f"output {number}, of shape {list(a.shape)}"
        together = b if not a.dim() else torch.cat([b, c]) if b.shape[1:] == c.shape[1:] else None
        if together is None or together.shape != a.shape:
            return f"{which}, has shapes {list(b.shape)} and {list(c.shape)} for the parts of the batch"
        wide = torch.complex128 if a.is_complex() else torch.float64
        scale = float(a.to(wide).abs().max()) if a.numel() else 0.0
        pairs = [(a, together)] if a.dim() else [(a, b), (a, c)]
        difference = max((float((x.to(wide) - y.to(wide)).abs().max()) for x, y in pairs if x.numel()), default=0.0)
        if not difference <= TOLERANCE * (scale or 1.0):
            return f"{which}, differs by {difference / (scale or 1.0):.1e} of its size in parts"
    return ""


def groups_differ(full: SamplePass, one: SamplePass, two: SamplePass) -> str:
    """The batch norm that normalises groups of samples which are not all there are (ghost batch norm): replicas, which
    share their statistics call by call, have other groups. Empty if there is none."""
    names = [[name for name, _ in found.norms] for found in (full, one, two)]
    if names[0] == names[1] == names[2]:
        rows = zip(full.norms, one.norms, two.norms, strict=True)
        return next((name for (name, all_of), (_, some), (_, rest) in rows if all_of != some + rest), "")
    every = {name for listed in names for name in listed}
    return next(name for name in sorted(every) if len({listed.count(name) for listed in names}) > 1)
