"""From the times of operators to the `Machine` that estimates are made of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.estimate.cost.learn import least_squares
from shoal.estimate.steps.machine import Curve, Machine, Product
from shoal.estimate.steps.operations import PRODUCTS

FIRST_GUESS = (8.0, 8.0, 16.0)
"""Sides at which the arithmetic takes twice as long, where the times do not say."""
WIDTHS = np.array([2.0, 1.0, 2.0, 2.0, 2.0])
"""How far each constant may lie from its first guess, in logarithms."""
NEAR = 0.05
"""An error of this size counts as one."""


def lower_quartile(seconds: Sequence[float]) -> float:
    """Other programs only ever add time."""
    return sorted(seconds)[len(seconds) // 4]


def fit_product(shapes: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[Product, float]:
    """(constants, median error) of products that took these times; a shape is (count, rows, columns, inner)."""
    sizes, took = np.array(shapes, dtype=float), np.array(seconds)
    flops = 2 * sizes.prod(axis=1)
    guess = np.log([min(float(took.min()), 2e-5), 1 / float((flops / took).max()), *FIRST_GUESS])

    def predicted(moved: np.ndarray) -> np.ndarray:
        start_s, flop_s, *halves = np.exp(guess + moved)
        found: np.ndarray = start_s + flops * flop_s * (1 + np.array(halves) / sizes[:, 1:]).prod(axis=1)
        return found

    def residuals(moved: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predicted(moved) / took) / NEAR, moved / WIDTHS])

    moved = least_squares(residuals, len(guess))
    start_s, flop_s, rows, columns, inner = (float(each) for each in np.exp(guess + moved))
    error = float(np.median(np.abs(predicted(moved) / took - 1)))
    return Product(start_s=start_s, flops=1 / flop_s, rows=rows, columns=columns, inner=inner), error


def machine_of(measured: Mapping[str, Any], collectives: Mapping[str, Curve]) -> tuple[Machine, dict[str, float]]:
    """(machine, median error of each kind of product); `measured` is what `operators.measure_machine` gives."""
    rows = [
        {**row, **{each: lower_quartile(row[each]) for each in ("forward_s", "backward_s")}}
        for row in measured["operators"]
    ]
    products, passes, updates, errors = {}, {}, {}, {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        here = [row for row in rows if row["kind"] == kind]
        if kind in PRODUCTS:
            shapes = [row["shape"] for row in here]
            (forward, first), (backward, second) = (
                fit_product(shapes, [row[each] for row in here]) for each in ("forward_s", "backward_s")
            )
            products[kind], errors[kind] = (forward, backward), max(first, second)
            continue
        sizes = tuple(float(row["shape"][0]) for row in here)
        forward_s, backward_s = (tuple(row[each] for row in here) for each in ("forward_s", "backward_s"))
        if kind in measured["optimizers"]:
            updates[kind] = Curve(sizes, forward_s)
        else:
            passes[kind] = (Curve(sizes, forward_s), Curve(sizes, backward_s))
    machine = Machine(
        ranks=measured["ranks"],
        memory_bytes=_memory_bytes(),
        memory_bytes_per_s=1 / lower_quartile(measured["byte_s"]),
        products=products,
        passes=passes,
        updates=updates,
        collectives=collectives,
        background_byte_s=max(1e-12, lower_quartile(measured["background_byte_s"])),
        overheads=overheads_of(
            {name: lower_quartile(each) for name, each in measured["overheads"].items()},
            counts=measured["counts"],
            ranks=measured["ranks"],
            sent_s=collectives["all_reduce"].at(1024),
            updated_s=updates["SGD"].at(1024),
        ),
        codecs={
            name: (float(tensor_s), float(element_s))
            for name, (tensor_s, element_s) in measured.get("codecs", {}).items()
        },
    )
    return machine, errors


def overheads_of(
    took: Mapping[str, float], *, counts: Mapping[str, int], ranks: int, sent_s: float, updated_s: float
) -> dict[str, float]:
    """What is left of small steps once computing, sending (an all-reduce of next to nothing) and updating are taken
    off: differences between a pass of a micro-batch with and without the operation being measured.
    """

    def pass_of(kind: str) -> float:
        return (took[f"{kind}, many"] - took[kind]) / counts["passes"]

    plain_s, pass_s = took["plain"], pass_of("replicated")
    found = {
        "step_s": took["replicated, many"] - (counts["passes"] + 1) * pass_s - sent_s - updated_s,
        "pass_s": pass_s - plain_s,
        "shared_s": took["one memory"] - took["replicated"] + sent_s,
        "action_s": (pass_of("pipeline") - plain_s / ranks) / 2,
        "gather_s": (pass_of("sharded") - pass_s) / counts["gathers"],
        "ring_s": (pass_of("ring") - pass_s) / counts["attentions"],
        "norm_s": (pass_of("sync norms") - pass_of("local norms")) / counts["norms"],
    }
    if "tensor" in took:
        found["crossing_s"] = (pass_of("tensor") - pass_s) / counts["crossings"]
    return {name: max(1e-7, seconds) for name, seconds in found.items()}


def _memory_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def alpha_beta(curve: Curve) -> tuple[float, float]:
    """(seconds a call, seconds a byte) nearest to the times, by relative error."""
    sizes, took = np.array(curve.sizes), np.array(curve.seconds)
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / took[:, None]
    scale = np.linalg.norm(rows, axis=0)
    found = np.linalg.lstsq(rows / scale, np.ones_like(took), rcond=None)[0] / scale
    return max(0.0, float(found[0])), max(0.0, float(found[1]))
