"""Fits the cost model's constants to published step times, and says how it does on sources that it has not seen.

    python benchmarks/fit_costs.py ROWS.csv                 fit on all sources, print the constants that moved
    python benchmarks/fit_costs.py ROWS.csv --leave-out     and fit again without each source in turn
    python benchmarks/fit_costs.py ROWS.csv --memory        memory of nanotron's rows, each model size left out in turn

Soft-L1 on log(predicted / measured); rows of a source of n rows weigh n^-0.35; each constant is held by a prior around
the value in the package, so that what the rows do not identify stays what was written down by hand. Needs scipy, which
the package itself does not.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from shoal.estimate.cost import GOOD, PHYSICS, PROFILES, Inputs, Physics, gathered, price, read_rows
from shoal.estimate.cost.learn import learn_profile
from shoal.estimate.cost.memory import GIB, memory
from shoal.estimate.cost.schedule import stages

Prior = tuple[float, float]
"""A value written down before any fit, and the width of its prior in logarithms."""

PRIORS: dict[str, Mapping[str, Prior]] = {
    "physics": {
        "matmul": (0.95, 0.05),
        "quantised": (0.6, 0.4),
        "depth": (165, 0.4),
        "edge": (44, 0.4),
        "fp8_gain": (1.85, 0.05),
        "cast_bytes": (3.0, 0.4),
        "fp8_row_gain": (1.2, 0.2),
        "elementwise": (1.3, 0.2),
        "loss_bytes": (25, 0.25),
        "optimizer_bytes": (30, 0.2),
        "flash_forward": (0.6, 0.15),
        "flash_backward": (0.29, 0.15),
        "scores_forward": (6, 0.25),
        "scores_backward": (9, 0.25),
        "bus": (0.73, 0.12),
        "collective_s": (19e-6, 0.3),
        "hop_ratio": (1.0, 0.5),
        "message_s": (0.26e-3, 0.5),
        "jitter": (0.008, 0.5),
        "fixed_s": (5e-3, 0.5),
        "blend": (6, 0.3),
        "skew": (1.8, 0.1),
        "ramp": (1.2, 0.3),
    },
    "megatron": {
        "flash_hopper": (0.58, 0.2),
        "tensor_hidden": (0.6, 0.2),
        "message_ratio": (0.3, 0.7),
        "elementwise": (1.0, 0.2),
        "shard_hidden": (0.7, 0.2),
    },
    "megatron-2021": {"elementwise": (1.0, 0.2)},
    "megatron-deepspeed": {
        "host_layer_s": (0.85e-3, 0.3),
        "host_tensor_s": (8e-6, 0.5),
        "host_pass_s": (0.9e-3, 0.5),
        "elementwise": (1.0, 0.2),
    },
    "deepspeed-2021": {"elementwise": (1.0, 0.2), "unhidden": (0.7, 0.4)},
    "mosaic": {"elementwise": (1.0, 0.2), "contention": (0.27, 0.5)},
    "torchtitan": {
        "elementwise": (1.4, 0.3),
        "flash_hopper": (0.58, 0.2),
        "contention": (0.27, 0.5),
        "selective_gemm": (0.5, 0.3),
        "selective_rest": (0.5, 0.3),
    },
    "nanotron": {
        "host_layer_s": (1.5e-3, 0.5),
        "host_tensor_s": (8e-6, 0.7),
        "host_pass_s": (0.9e-3, 0.7),
        "elementwise": (1.0, 0.3),
        "flash_hopper": (0.58, 0.2),
        "hop_ratio": (5.0, 0.5),
        "hop_power": (0.3, 0.5),
        "data_hidden": (0.5, 0.5),
        "data_exposed": (0.1, 0.7),
        "stall_tensor_s": (1.8e-3, 0.7),
        "stall_power": (1.12, 0.2),
        "stall_message_s": (0.3, 0.5),
        "stall_reduce_s": (6e-12, 0.5),
        "buckets": (0.3, 0.7),
        "overfull": (3.0, 0.5),
    },
}
"""Constants to fit, by owner."""
SCALE = 0.05
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
        return Data(
            inputs=self.inputs.rows(chosen),
            profiles=self.profiles,
            index=self.index[chosen],
            variants=self.variants,
            measured=self.measured[chosen],
            source=self.source[chosen],
        )


def load(path: str) -> Data:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok" and row["step_s"]]
    read = read_rows(rows)
    kept = [rows[i] for i in read.priced]
    return Data(
        inputs=read.inputs,
        profiles=tuple(profile.name for profile in read.profiles),
        index=read.profile_index,
        variants=read.profiles,
        measured=np.array([float(row["step_s"]) for row in kept]),
        source=np.array([row["source"] for row in kept]),
    )


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
    return price(
        data.inputs, gathered(profiles, data.index), physics=replace(PHYSICS, **moved.get("physics", {}))
    ).step_s


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
        lines.append(
            f"  {source:18} n {chosen.sum():5}  median {100 * np.median(abs(off)):5.1f}  "
            f"mape {100 * np.mean(abs(off)):5.1f}  bias {100 * np.mean(off):6.1f}"
        )
    return "\n".join(lines)


def show(names: Names, logs: np.ndarray) -> str:
    return "\n".join(
        f"  {owner:20} {field:20} {value:.4g} -> {value * np.exp(log):.4g}"
        for (owner, field, value, _), log in zip(names, logs, strict=True)
    )


def left_out(data: Data, names: Names) -> tuple[np.ndarray, Physics]:
    """Predictions of each source by constants fitted on all others; nanotron without a profile of its own. And the
    physics that knows nothing of nanotron.
    """
    guess = np.zeros(len(data.measured))
    blind = PHYSICS
    for source in sorted(set(data.source)):
        inside = data.source != source
        logs = fit(data.some(inside), names)
        if source == "nanotron":
            values = {
                field: float(value * np.exp(log))
                for (owner, field, value, _), log in zip(names, logs, strict=True)
                if owner == "physics"
            }
            blind = replace(PHYSICS, **values)
            guess[~inside] = price(data.some(~inside).inputs, UNKNOWN, physics=blind).step_s
        else:
            guess[~inside] = predicted(data.some(~inside), names, logs)
    return guess, blind


def devices_left_out(data: Data, names: Names) -> str:
    """nanotron's runs on each number of devices by constants fitted without them."""
    lines = []
    for devices in np.unique(data.inputs.devices[data.source == "nanotron"]):
        outside = (data.source == "nanotron") & (data.inputs.devices == devices)
        guess = predicted(data.some(outside), names, fit(data.some(~outside), names))
        off = abs(guess / data.measured[outside] - 1)
        lines.append(
            f"  {devices:5.0f} devices: n {outside.sum():4}  median {100 * np.median(off):5.1f}  "
            f"mape {100 * np.mean(off):5.1f}"
        )
    return "\n".join(lines)


UNKNOWN = replace(GOOD, gradient_bytes=4.0, by_cost=1.0)
"""What one may know of nanotron without having timed it: 32-bit gradients, layers dealt to stages by cost."""


def learned(rows: list[dict[str, str]], physics: Physics, draws: int = 5) -> str:
    """nanotron with thirty of its own rows, on the others."""
    inputs = read_rows(rows).inputs
    measured = np.array([float(row["step_s"]) for row in rows])
    lines = []
    for seed in range(draws):
        chosen = np.random.default_rng(seed).choice(len(rows), 30, replace=False)
        profile = learn_profile([rows[i] for i in chosen], UNKNOWN, physics=physics)
        others = np.setdiff1d(np.arange(len(rows)), chosen)
        off = abs(price(inputs, profile, physics=physics).step_s / measured - 1)[others]
        lines.append(f"  draw {seed}: median {100 * np.median(off):.1f}, mape {100 * np.mean(off):.1f}")
    return "\n".join(lines)


MEMORY = {
    "gradient_held_bytes": (5.6, 0.15),
    "state_bytes": (13.0, 0.15),
    "norm_bytes": (7.0, 0.3),
    "attention_bytes": (4.0, 0.3),
    "ffn_bytes": (2.1, 0.3),
    "regathered_bytes": (3.4, 0.3),
    "logit_bytes": (8.0, 0.3),
    "buffer_bytes": (0.32e9, 0.5),
}


def memory_left_out(rows: list[dict[str, str]]) -> str:
    """Memory of nanotron's rows by constants fitted on its other model sizes."""
    inputs = read_rows(rows).inputs
    real = np.array([float(row["memory_gib"]) for row in rows]) * GIB
    models = np.array([row["model"] for row in rows])
    widths = np.array([width for _, width in MEMORY.values()])

    def guess(logs: np.ndarray, some: np.ndarray) -> np.ndarray:
        profile = replace(
            PROFILES["nanotron"],
            **{field: value * np.exp(log) for (field, (value, _)), log in zip(MEMORY.items(), logs, strict=True)},
        )
        here = inputs.rows(some)
        return memory(here, profile, held=stages(here, profile)).total_bytes

    def residuals(logs: np.ndarray, some: np.ndarray) -> np.ndarray:
        off = np.log(guess(logs, some) / real[some]) / 0.05
        return np.concatenate([np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)) / 2, logs / widths])

    off, lines = np.zeros(len(rows)), []
    for model in sorted(set(models)):
        inside, outside = np.flatnonzero(models != model), np.flatnonzero(models == model)
        logs = least_squares(residuals, np.zeros(len(MEMORY)), diff_step=1e-3, args=(inside,)).x
        off[outside] = guess(logs, outside) / real[outside] - 1
        lines.append(f"  without {model:22} median {100 * np.median(abs(off[outside])):5.1f}")
    return "\n".join(
        [
            *lines,
            f"  all {len(rows)} rows: median {100 * np.median(abs(off)):.1f}, "
            f"mape {100 * np.mean(abs(off)):.1f}, bias {100 * np.mean(off):.1f}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--memory", action="store_true")
    chosen = parser.parse_args()
    data, names = load(chosen.rows), constants()
    with open(chosen.rows, newline="", encoding="utf-8") as file:
        nanotron = [row for row in csv.DictReader(file) if row["source"] == "nanotron" and row["status"] == "ok"]
    if chosen.memory:
        print("memory, a model size left out\n" + memory_left_out([row for row in nanotron if row["memory_gib"]]))
        return
    print("as it is\n" + table(data, predicted(data, names, present(names))))
    logs = fit(data, names)
    print("fitted\n" + table(data, predicted(data, names, logs)) + "\n" + show(names, logs))
    if chosen.leave_out:
        guess, blind = left_out(data, names)
        print("each source left out\n" + table(data, guess))
        print("nanotron, a number of devices left out\n" + devices_left_out(data, names))
        print("nanotron, a profile from 30 rows\n" + learned([row for row in nanotron if row["step_s"]], blind))


if __name__ == "__main__":
    main()
