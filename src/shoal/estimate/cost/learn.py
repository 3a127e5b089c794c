"""Fits a framework profile to some tens of steps measured on a cluster.

Physics stays as it is; only the handful of constants that describe the host path, the overlap and the latency of a
place move, by damped Gauss-Newton on the logarithms, held by priors around the profile one starts from. Rows that
stall for reasons no column names count little (soft-L1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.estimate.cost.constants import PHYSICS, Physics
from shoal.estimate.cost.inputs import Column, Inputs
from shoal.estimate.cost.price import price
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.rows import Row, read_rows

WIDTHS: Mapping[str, float] = {
    "host_layer_s": 0.7,
    "host_tensor_s": 1.0,
    "host_pass_s": 0.7,
    "elementwise": 0.3,
    "flash_hopper": 0.2,
    "hop_ratio": 1.0,
    "hop_power": 0.5,
    "contention": 0.7,
    "message_ratio": 1.0,
    "buckets": 0.7,
    "data_hidden": 0.5,
    "shard_hidden": 0.7,
    "stall_tensor_s": 2.0,
    "stall_message_s": 2.0,
}
"""What may move, and how far: the width of each prior in logarithms."""
FLOORS: Mapping[str, float] = {
    "stall_tensor_s": 0.2e-3,
    "stall_message_s": 1e-3,
    "hop_power": 0.2,
    "host_tensor_s": 2e-6,
}
"""Where a constant starts that the given profile has at zero: a logarithm must start somewhere."""
SCALE = 0.1
ROUNDS = 25


def learn_profile(rows: Sequence[Row], start: Profile, *, name: str = "learned", physics: Physics = PHYSICS) -> Profile:
    """A profile that explains the rows' `step_s`, near `start` where they do not say."""
    timed = [row for row in rows if row.get("step_s") and row.get("status", "ok") == "ok"]
    if len(timed) < 3:
        raise ValueError(f"{len(timed)} rows have a step_s; a profile needs at least 3, better 30")
    read = read_rows(timed)
    measured = np.array([float(timed[i]["step_s"]) for i in read.priced])
    floors: dict[str, Any] = {field: max(float(getattr(start, field)), floor) for field, floor in FLOORS.items()}
    begun = replace(start, name=name, **floors)
    # Stalls begin at some number of devices, or of ranks of tp over several nodes, or never: each that the rows know is
    # tried, and the best explanation wins.
    crowds, groups = {float(start.crowd_devices), 1e9}, {float(start.crowd_tensor), 1e9}
    if np.any(read.inputs.pp > 1):
        crowds.update(np.unique(read.inputs.devices))
        groups.update(np.unique(read.inputs.tp[read.inputs.tp > read.inputs.level_ranks[0]]))
    found = [
        _fitted(replace(begun, crowd_devices=devices, crowd_tensor=ranks), read.inputs, measured, physics)
        for devices in sorted(crowds)
        for ranks in sorted(groups)
    ]
    return min(found, key=lambda pair: pair[1])[0]


def _fitted(begun: Profile, inputs: Inputs, measured: Column, physics: Physics) -> tuple[Profile, float]:
    """The best profile near `begun`, and its loss."""
    fields, widths = tuple(WIDTHS), np.array(list(WIDTHS.values()))

    def at(logs: np.ndarray) -> Profile:
        moved: dict[str, Any] = {}
        for field, log in zip(fields, logs, strict=True):
            value = float(getattr(begun, field) * np.exp(log))
            moved[field] = min(value, 1.0) if field.endswith("_hidden") else value
        return replace(begun, **moved)

    def residuals(logs: np.ndarray) -> Column:
        off = np.log(price(inputs, at(logs), physics=physics).step_s / measured) / SCALE
        soft = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))  # Its square is the soft-L1 loss.
        return np.concatenate([soft, logs / widths])

    logs = least_squares(residuals, len(fields))
    left = residuals(logs)
    return at(logs), float(left @ left)


def least_squares(residuals: Callable[[np.ndarray], Column], size: int) -> np.ndarray:
    """Levenberg-Marquardt with differences for derivatives."""
    logs, damping = np.zeros(size), 1.0
    now = residuals(logs)
    for _ in range(ROUNDS):
        slopes = np.stack([(residuals(logs + step) - now) / 1e-3 for step in 1e-3 * np.eye(size)], axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ now
        for _ in range(8):
            moved = logs - np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient), -1.0, 1.0)
            there = residuals(moved)
            if there @ there < now @ now:
                gain = (now @ now - there @ there) / (now @ now)
                logs, now, damping = moved, there, damping / 3
                if gain < 1e-5:
                    return logs
                break
            damping *= 4
        else:
            return logs
    return logs
