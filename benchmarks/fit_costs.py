"""Fits the cost model's constants to published step times, and says how it does on sources that it has not seen.

    python benchmarks/fit_costs.py ROWS.csv                 fit on all sources, print the constants that moved
    python benchmarks/fit_costs.py ROWS.csv --leave-out     and fit again without each source in turn

Soft-L1 on log(predicted / measured); rows of a source of n rows weigh n^-0.35; each constant is held by a prior around the
value in the package, so that what the rows do not identify stays what was written down by hand. Needs scipy, which the
package itself does not.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from shoal.estimate.cost import PHYSICS, PROFILES, Inputs, gathered, price, read_rows

Prior = tuple[float, float]
"""A value written down before any fit, and the width of its prior in logarithms."""

PRIORS: dict[str, Mapping[str, Prior]] = {
    "physics": {
        "matmul": (0.95, 0.05), "quantised": (0.6, 0.4), "depth": (165, 0.4), "edge": (44, 0.4), "fp8_gain": (1.7, 0.2),
        "fp8_row_gain": (1.0, 0.2), "elementwise": (1.3, 0.2), "loss_bytes": (25, 0.25), "optimizer_bytes": (30, 0.2),
        "flash_forward": (0.6, 0.15), "flash_backward": (0.29, 0.15), "scores_forward": (6, 0.25),
        "scores_backward": (9, 0.25), "bus": (0.73, 0.12), "collective_s": (19e-6, 0.3),
        "hop_ratio": (1.0, 0.5), "message_s": (0.26e-3, 0.5), "jitter": (0.008, 0.5), "fixed_s": (5e-3, 0.5),
        "blend": (6, 0.3), "skew": (1.8, 0.1), "ramp": (1.2, 0.3),
    },
    "megatron": {
        "flash_hopper": (0.58, 0.2), "tensor_hidden": (0.6, 0.2), "message_ratio": (0.3, 0.7), "elementwise": (1.0, 0.2),
        "shard_hidden": (0.5, 0.5),
    },
    "megatron-2021": {"elementwise": (1.0, 0.2)},
    "megatron-deepspeed": {
        "host_layer_s": (0.85e-3, 0.3), "host_tensor_s": (8e-6, 0.5), "host_pass_s": (0.9e-3, 0.5), "elementwise": (1.0, 0.2),
    },
    "deepspeed-zero3": {"elementwise": (1.0, 0.2)},
    "mosaic": {"elementwise": (1.0, 0.2), "contention": (0.27, 0.5)},
    "torchtitan": {
        "elementwise": (1.4, 0.3), "flash_hopper": (0.58, 0.2), "contention": (0.27, 0.5), "selective_gemm": (0.5, 0.3),
        "selective_rest": (0.5, 0.3),
    },
    "nanotron": {
        "host_layer_s": (1.5e-3, 0.5), "host_tensor_s": (8e-6, 0.7), "host_pass_s": (0.9e-3, 0.7), "elementwise": (1.0, 0.3),
        "flash_hopper": (0.58, 0.2), "hop_ratio": (5.0, 0.5), "hop_power": (0.3, 0.5), "data_hidden": (0.5, 0.5),
        "data_exposed": (0.1, 0.7), "stall_tensor_s": (1.8e-3, 0.7), "stall_power": (1.12, 0.2),
        "stall_message_s": (0.3, 0.5), "stall_reduce_s": (6e-12, 0.5), "buckets": (0.3, 0.7),
    },
}  # fmt: skip
"""Constants to fit, by owner."""
SCALE = 0.08
"""Residuals well above this count linearly."""
PRIOR = 0.7
"""Weight of the priors against the rows."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Rows that ran, as columns."""

    inputs: Inputs
    profiles: tuple[str, ...]
    index: np.ndarray
    variants: tuple
    measured: np.ndarray
    source: np.ndarray

    def some(self, chosen: np.ndarray) -> Data:
        return Data(inputs=self.inputs.rows(chosen), profiles=self.profiles, index=self.index[chosen],
                    variants=self.variants, measured=self.measured[chosen], source=self.source[chosen])  # fmt: skip


def load(path: str) -> Data:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok" and row["step_s"]]
    read = read_rows(rows)
    kept = [rows[i] for i in read.priced]
    return Data(
        inputs=read.inputs, profiles=tuple(profile.name for profile in read.profiles), index=read.profile_index,
        variants=read.profiles, measured=np.array([float(row["step_s"]) for row in kept]),
        source=np.array([row["source"] for row in kept]),
    )  # fmt: skip


Names = tuple[tuple[str, str, float, float], ...]


def constants(priors: Mapping[str, Mapping[str, Prior]] = PRIORS) -> Names:
    """(owner, field, value before the fit, width)."""
    return tuple((owner, field, *prior) for owner, fields in priors.items() for field, prior in fields.items())


def present(names: Names) -> np.ndarray:
    """The logarithms that give the constants of the package."""
    now = [getattr(PHYSICS if owner == "physics" else PROFILES[owner], field) for owner, field, *_ in names]
    return np.log([value / before for value, (*_, before, _) in zip(now, names, strict=True)])


def predicted(data: Data, names: Names, logs: np.ndarray) -> np.ndarray:
    """Step times with constants at exp(logs) times the values before the fit."""
    moved: dict[str, dict[str, float]] = {}
    for (owner, field, value, _), log in zip(names, logs, strict=True):
        moved.setdefault(owner, {})[field] = float(value * np.exp(log))
    profiles = []
    for profile in data.variants:
        owner = max((name for name in PROFILES if profile.name.startswith(name)), key=len)
        # A variant (compiled, asynchronous) differs from its owner by factors, which stay.
        factors = {field: value / getattr(PROFILES[owner], field) for field, value in moved.get(owner, {}).items()}
        profiles.append(replace(profile, **{field: getattr(profile, field) * by for field, by in factors.items()}))
    return price(data.inputs, gathered(profiles, data.index), physics=replace(PHYSICS, **moved.get("physics", {}))).step_s


def fit(data: Data, names: Names) -> np.ndarray:
    """The logarithms of the best factors."""
    sources, counts = np.unique(data.source, return_counts=True)
    weight = np.array([counts[list(sources).index(source)] ** -0.35 for source in data.source]) ** 0.5
    widths = np.array([width for *_, width in names])
    logs = np.zeros(len(names))

    def residuals(x: np.ndarray) -> np.ndarray:
        off = np.log(predicted(data, names, x) / data.measured) / SCALE
        soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))  # Its square is the soft-L1 loss.
        return np.concatenate([weight * soft, PRIOR * x / widths])

    return least_squares(residuals, logs, method="trf", max_nfev=25, diff_step=1e-3, ftol=1e-4).x


def table(data: Data, guess: np.ndarray) -> str:
    lines = []
    for source in (*sorted(set(data.source)), "all"):
        chosen = data.source == source if source != "all" else np.ones(len(data.source), bool)
        off = guess[chosen] / data.measured[chosen] - 1
        lines.append(f"  {source:18} n {chosen.sum():5}  median {100 * np.median(abs(off)):5.1f}  "
                     f"mape {100 * np.mean(abs(off)):5.1f}  bias {100 * np.mean(off):6.1f}")  # fmt: skip
    return "\n".join(lines)


def show(names: Names, logs: np.ndarray) -> str:
    return "\n".join(f"  {owner:20} {field:20} {value:.4g} -> {value * np.exp(log):.4g}"
                     for (owner, field, value, _), log in zip(names, logs, strict=True))  # fmt: skip


def left_out(data: Data, names: Names, sources: Sequence[str]) -> np.ndarray:
    """Predictions of each source by constants fitted on all others."""
    guess = np.zeros(len(data.measured))
    for source in sources:
        inside = data.source != source
        logs = fit(data.some(inside), names)
        guess[~inside] = predicted(data.some(~inside), names, logs)
    return guess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows")
    parser.add_argument("--leave-out", action="store_true")
    chosen = parser.parse_args()
    data, names = load(chosen.rows), constants()
    print("as it is\n" + table(data, predicted(data, names, present(names))))
    logs = fit(data, names)
    print("fitted\n" + table(data, predicted(data, names, logs)) + "\n" + show(names, logs))
    if chosen.leave_out:
        print("each source left out\n" + table(data, left_out(data, names, sorted(set(data.source)))))


if __name__ == "__main__":
    main()
