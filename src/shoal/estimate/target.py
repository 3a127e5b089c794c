"""How many steps a run needs to its target: by batch size, staleness, local steps and compression.

steps = S_min (1 + B_noise / B) (McCandlish et al. 2018): small batches waste no samples, large ones no steps. What a
strategy changes in what is learned multiplies that. Numbers are defaults with a source, or come from pilot runs, and
each knows which.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from shoal.shapes.shape import Transformer
from shoal.strategy.terms.compress import compressors

TOKENS_A_PARAMETER = 20.0
"""Compute-optimal training (Hoffmann et al. 2022), for the parameters that a token meets."""
IRREDUCIBLE, BY_PARAMETERS, BY_TOKENS = 1.69, (406.4, 0.34), (410.7, 0.28)
"""Loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (Hoffmann et al. 2022)."""
CRITICAL_TOKENS, CRITICAL_POWER = 2.1e8, 1 / 0.21
"""Noise scale in tokens at a loss: 2.1e8 / loss^(1/0.21) (Kaplan et al. 2020)."""

DENSE_STEPS, LONGEST_RUN = 230, 300
"""Steps of the dense run to the language task's target, and those after which a compressed run was given up:
`python benchmarks/slow_link.py --rounds 4`, docs/compression.md."""
SLOWDOWNS: Mapping[str, float] = {
    term.__name__: 1.0 if term.reaches_target else max(1 + term.within, LONGEST_RUN / DENSE_STEPS)
    for term in compressors()
}
"""Steps against dense. For a compression that did not reach the target it is a lower bound, and plans say so; pilot
rows replace it."""


class MoreSteps(NamedTuple):
    """What inconsistency costs under one optimiser, as a fraction of the steps."""

    stale_step: float
    """For each step of staleness."""
    doubling: float
    """For averaging half as often."""
    origin: str


OPTIMIZERS: Mapping[str, MoreSteps] = {
    "sgd": MoreSteps(0.05, 0.03, "assumed, from Zhang et al. 2016 (staleness) and Lin et al. 2020 (local steps)"),
    "adamw": MoreSteps(0.10, 0.03, "assumed, from 2606.30634 (one late step hurts AdamW) and Douillard et al. 2023"),
    "muon": MoreSteps(0.02, 0.02, "assumed, from 2606.30634 (it hardly hurts Muon) and MuLoCo, 2505.23725"),
}
"""By optimiser. None was measured here: pilot rows, or docs/consistency.md, say more of a task of your own."""


class BadPilot(ValueError):
    """Rows of pilot runs from which nothing can be learned, in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCost:
    """What a run needs, in samples (sequences)."""

    samples: float
    """At batches far below the noise scale."""
    noise_batch: float
    """Samples in a batch that needs twice the steps of the largest, and twice the samples of the smallest."""
    slowdowns: Mapping[str, float] = field(default_factory=lambda: dict(SLOWDOWNS))
    optimizer: str = "adamw"
    """One of OPTIMIZERS."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from."""

    def steps(self, batch: float, *, compress: str = "none", staleness: float = 0.0, local_steps: int = 1) -> float:
        """Optimiser steps to the target."""
        least = self.samples / self.noise_batch
        late = 1 + OPTIMIZERS[self.optimizer].stale_step * staleness
        drift = late * local_slowdown(local_steps, optimizer=self.optimizer)
        return least * (1 + self.noise_batch / batch) * self.slowdowns.get(compress, 1.0) * drift


def local_slowdown(local_steps: int, *, optimizer: str = "adamw") -> float:
    """Steps of islands that are averaged every `local_steps`, relative to those of replicas that step together."""
    return 1 + OPTIMIZERS[optimizer].doubling * max(0, int(local_steps).bit_length() - 1)


def default_target(shape: Transformer) -> TargetCost:
    """Scaling laws of language models, for a shape."""
    tokens = TOKENS_A_PARAMETER * shape.active_parameters
    loss = IRREDUCIBLE
    for amount, (factor, power) in ((shape.active_parameters, BY_PARAMETERS), (tokens, BY_TOKENS)):
        loss += factor / amount**power
    noise = CRITICAL_TOKENS / loss**CRITICAL_POWER
    return TargetCost(
        samples=tokens / shape.sequence,
        noise_batch=noise / shape.sequence,
        origins={
            "samples": f"default: {TOKENS_A_PARAMETER:g} tokens a parameter (Hoffmann et al. 2022)",
            "noise_batch": f"default: 2.1e8 / loss^4.76 tokens at a loss of {loss:.2f} (Kaplan et al. 2020; "
            "loss by Hoffmann et al. 2022)",
            "compression": "default: measured on the language task (docs/compression.md); those that did not reach "
            f"its target in {LONGEST_RUN} steps, where dense gradients need {DENSE_STEPS}, count as that bound",
        },
    )


def read_pilot(path: str | Path, *, start: TargetCost) -> TargetCost:
    """A target learned from a CSV of pilot runs with the columns batch, steps and, if any, compress."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise BadPilot(f"{path}: {getattr(error, 'strerror', None) or error}; name a file that can be read") from None
    try:
        return learn_target(rows, start=start)
    except BadPilot as error:
        raise BadPilot(f"{path}: {error}") from None


def learn_target(rows: Sequence[Mapping[str, str]], *, start: TargetCost) -> TargetCost:
    """Dense rows of two and more batch sizes give samples and noise scale (a least-squares line over 1 / batch);
    compressed ones their slowdown. What the rows do not say stays as it was.
    """
    dense, squeezed = _pilot_runs(rows)
    found, origins = start, dict(start.origins)
    sizes = sorted({batch for batch, _ in dense})
    if len(sizes) >= 2:
        inverse = [1 / batch for batch, _ in dense]
        steps = [steps for _, steps in dense]
        mean_x, mean_y = sum(inverse) / len(inverse), sum(steps) / len(steps)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(inverse, steps, strict=True))
        slope /= sum((x - mean_x) ** 2 for x in inverse)
        least = mean_y - slope * mean_x
        if slope <= 0:
            raise BadPilot("larger batches took more steps than smaller ones; the target was not reached by batch size")
        least = max(least, 1e-3 * mean_y)
        found = replace(found, samples=slope, noise_batch=slope / least)
        origins |= {
            name: f"pilot: {len(dense)} runs of batches {sizes[0]:g} to {sizes[-1]:g}"
            for name in ("samples", "noise_batch")
        }
    elif len(sizes) == 1:
        mean_steps = sum(steps for _, steps in dense) / len(dense)
        scale = mean_steps / found.steps(sizes[0])
        found = replace(found, samples=found.samples * scale)
        origins["samples"] = f"pilot: runs of batch {sizes[0]:g}; the noise scale stays the default"
    slowdowns = dict(found.slowdowns)
    for name, pairs in squeezed.items():
        slowdowns[name] = sum(steps / found.steps(batch) for batch, steps in pairs) / len(pairs)
        origins[f"compress {name}"] = f"pilot: {len(pairs)} runs"
    return replace(found, slowdowns=slowdowns, origins=origins)


def _pilot_runs(
    rows: Sequence[Mapping[str, str]],
) -> tuple[list[tuple[float, float]], dict[str, list[tuple[float, float]]]]:
    dense: list[tuple[float, float]] = []
    squeezed: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(rows, start=1):
        try:
            batch, steps = float(row["batch"]), float(row["steps"])
        except (KeyError, TypeError, ValueError):
            raise BadPilot(
                f"row {number} has no number for batch or steps; expected columns batch,steps[,compress]"
            ) from None
        if not (0 < batch < float("inf") and 0 < steps < float("inf")):
            raise BadPilot(f"row {number} has batch {batch:g} and steps {steps:g}; expected numbers above 0")
        name = (row.get("compress") or "none").split("(")[0].strip()
        if name in ("none", ""):
            dense.append((batch, steps))
        else:
            squeezed.setdefault(name, []).append((batch, steps))
    if not dense and not squeezed:
        raise BadPilot("it has no rows; expected columns batch,steps[,compress]")
    return dense, squeezed
