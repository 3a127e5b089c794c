"""Fits the constants of replicated models (images, detection, BERT) to published throughputs.

    python benchmarks/fit_replicated.py ROWS.csv

Soft-L1 on log(predicted / measured), priors of half a power of e around the values before the fit. Prints what moved.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace

import numpy as np
from replicated import HABITS, KERNELS, columns, step_times
from scipy.optimize import least_squares

MOVES = ("passes", "encoder", "launch", "network")
HELD = ("exposed", "launch_s")
"""What the rows would push past its meaning, or do not reach."""
WIDTH = 0.5


def main() -> None:
    with open(sys.argv[1], newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    given, priced, refused = columns(rows)
    measured = np.array([float(rows[i]["step_s"]) for i in priced])
    names = [("kernels", field) for field in KERNELS.__slots__ if field not in HELD] + [
        (key, field) for key in HABITS for field in MOVES
    ]

    def at(logs: np.ndarray) -> np.ndarray:
        kernels, habits = KERNELS, dict(HABITS)
        for (owner, field), log in zip(names, logs, strict=True):
            if owner == "kernels":
                kernels = replace(kernels, **{field: getattr(KERNELS, field) * np.exp(log)})
            else:
                habits[owner] = replace(habits[owner], **{field: getattr(HABITS[owner], field) * np.exp(log)})
        return step_times(given, kernels, habits)

    def residuals(logs: np.ndarray) -> np.ndarray:
        off = np.log(at(logs) / measured) / 0.1
        return np.concatenate([np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)), logs / WIDTH])

    for title, logs in (
        ("as it is", np.zeros(len(names))),
        ("fitted", least_squares(residuals, np.zeros(len(names)), diff_step=1e-3).x),
    ):
        off = at(logs) / measured - 1
        print(
            f"{title}: median {100 * np.median(abs(off)):.1f}, mape {100 * np.mean(abs(off)):.1f}, {len(refused)} out"
        )
        for model in sorted({rows[i]["model"] for i in priced}):
            here = np.array([rows[i]["model"] == model for i in priced])
            print(f"  {model:20} {here.sum():4} {100 * np.mean(abs(off[here])):5.1f} {100 * np.mean(off[here]):6.1f}")
    for (owner, field), log in zip(names, logs, strict=True):
        value = getattr(KERNELS if owner == "kernels" else HABITS[owner], field)
        print(f"  {owner:14} {field:16} {value:.4g} -> {value * np.exp(log):.4g}")


if __name__ == "__main__":
    main()
