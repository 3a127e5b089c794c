"""How far rounding alone moves the gate's serial steps: asked only where a difference exceeds the plain tolerance.

The serial steps are repeated with another rounding of the same numbers (parameters moved by less than their last
digit, samples summed in reverse). A tensor may differ by a multiple of what it moves then, as in `verify`. Where even
that is more than a fault would show, nothing can be concluded, and the strategy counts as unchecked.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from safetensors import safe_open

from shoal.job import Job
from shoal.proof.compare import MARGIN
from shoal.proof.gate import TOLERANCES
from shoal.proof.gate_compare import Row, max_diff, scale_of_update, size_of, unsure
from shoal.proof.gate_serial import SerialSteps, serial_steps
from shoal.proof.undropped import Undropped
from shoal.runtime.compiled import running_eagerly
from shoal.runtime.float64 import KeepFloat64, model_in_float64
from shoal.runtime.step import build_model
from shoal.strategy import Strategy

DISTURBANCES = 2
WIDEST = 1e-5
"""The widest tolerance: wrong layouts measure 1e-4 and more."""

Moved = dict[str, float]
"""Where -> the largest relative difference that rounding made there."""


def movement(job: Job, strategy: Strategy, serial: dict[str, Any], *, steps: int) -> Moved:
    """In the process that wrote the serial steps to `serial["path"]`: how far they move."""
    moved: Moved = {}
    before = torch.get_rng_state()
    try:
        for seed in range(1, 1 + DISTURBANCES):
            model = model_in_float64(build_model(job))
            with KeepFloat64(), Undropped(), running_eagerly():
                other = serial_steps(job, strategy, model, has_state=serial["has_state"], steps=steps, disturbed=seed)
            for row in _rows(serial, other):
                by = row.difference if math.isfinite(row.difference) else sys.float_info.max
                moved[row.where] = max(moved.get(row.where, 0.0), by)
    finally:
        torch.set_rng_state(before)
    return moved


def allowed(row: Row, moved: Moved) -> float:
    """The largest difference at which a row is not wrong."""
    return max(TOLERANCES[row.kind], MARGIN * moved.get(row.where, 0.0))


def hidden(rows: list[Row], moved: Moved) -> str:
    """Why rows that are not wrong prove nothing all the same; empty if they do."""
    for row in sorted(rows, key=lambda row: row.kind == "update"):
        if row.difference > TOLERANCES[row.kind] and allowed(row, moved) > WIDEST:
            what, agree = row.where, ""
            if row.kind == "update":
                # An optimiser that takes eigenvectors of sums of gradients does this where they have less than full
                # rank.
                what, agree = f"the update of {row.where}", " (the gradients of the ranks are right)"
            return (
                f"rounding alone moves {what} by {moved[row.where]:.1e} of its size in a serial step in float64, and "
                f"{MARGIN:g} times that could hide a fault{agree}; a larger batch may be better conditioned"
            )
    return ""


def _rows(serial: dict[str, Any], other: SerialSteps) -> list[Row]:
    """The steps in the file against others, by the measures of `GateComparison`."""
    rows = [
        Row(abs(one - two) / max(abs(one), 1e-300), "loss", f"the loss of step {step + 1}")
        for step, (one, two) in enumerate(zip(serial["losses"], other.losses, strict=False))
    ]
    with safe_open(serial["path"], framework="pt") as reference:
        known = set(reference.keys())
        limit = float(reference.get_tensor("limit"))
        least = float(reference.get_tensor("least"))
        for name, gradient in other.gradients.items():
            if f"gradient:{name}" in known:
                one = reference.get_tensor(f"gradient:{name}")
                size = max(size_of(one), least) or 1.0
                rows.append(Row(max_diff(gradient, one) / size, "gradient", f"the gradient of {name}"))
        for name, buffer in other.buffers.items():
            one = reference.get_tensor(f"buffer:{name}")
            if one.numel() and one.shape == buffer.shape:
                rows.append(Row(max_diff(buffer, one) / max(size_of(one), 1.0), "buffer", f"the buffer {name}"))
        for name, after in other.after.items():
            first, last, peak = (reference.get_tensor(f"{kind}:{name}") for kind in ("before", "after", "peak"))
            sure = ~unsure(peak, other.peaks[name], limit)
            rows.append(Row(max_diff(after[sure], last[sure]) / scale_of_update(first, last), "update", name))
    return rows
