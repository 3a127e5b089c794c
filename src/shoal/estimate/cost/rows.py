"""Reads rows of measurements (a CSV as dictionaries) into `Inputs` and the profiles of their frameworks.

What cannot be priced is named with its reason and set aside, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.cluster import BadCluster, Device, device
from shoal.cluster.presets import NETWORK_HOP_S, NVLINK_HOP_S
from shoal.estimate.cost.inputs import (
    ORDER,
    PRECISIONS,
    RECOMPUTE,
    SCHEDULES,
    UNKNOWN,
    Inputs,
    device_at,
    strides,
)  # fmt: skip
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profiles import profile_for

Row = Mapping[str, str]

NEEDED = ("layers", "hidden", "heads", "seq", "vocab", "gpu", "gpus", "micro_batch", "global_batch")
"""Columns without which nothing can be said."""

_DEFAULTS = {
    "kv_heads": "", "ffn": "", "gated": "0", "tied": "0", "experts": "0", "active_experts": "0", "gpus_per_node": "8",
    "intra_gb_s": "", "inter_gb_s": "", "dp": "", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "chunks": "1",
    "schedule": "", "zero": "0", "sequence": "0", "recompute": "none", "precision": "bf16", "overlap": "",
    "framework": "", "kind": "decoder",
}  # fmt: skip


class BadRows(ValueError):
    """A file that lacks what every prediction needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Rows that can be priced, and those that cannot with the reason."""

    inputs: Inputs
    profiles: tuple[Profile, ...]
    profile_index: np.ndarray
    priced: tuple[int, ...]
    """Which of the given rows the columns hold, in order."""
    refused: tuple[tuple[int, str], ...]


def read_rows(rows: Sequence[Row]) -> Read:
    """Columns and profiles of rows with the columns of `NEEDED`; everything else has a default."""
    missing = [name for name in NEEDED if rows and name not in rows[0]]
    if not rows or missing:
        raise BadRows(f"the file lacks the columns {', '.join(missing)}" if missing else "the file has no rows")
    parsed, priced, refused, index = [], [], [], []
    profiles: dict[Profile, int] = {}
    for number, row in enumerate(rows):
        try:
            values = _values(row)
            profile = profile_for(values["framework"], device=values["device"].name, precision=values["precision"])
        except (ValueError, BadCluster) as error:
            refused.append((number, str(error)))
            continue
        parsed.append(values)
        priced.append(number)
        index.append(profiles.setdefault(profile, len(profiles)))
    if not parsed:
        raise BadRows(f"no row can be priced; the first says: {refused[0][1]}")
    return Read(
        inputs=_columns(parsed), profiles=tuple(profiles), profile_index=np.array(index), priced=tuple(priced),
        refused=tuple(refused),
    )  # fmt: skip


def inputs_from_rows(rows: Sequence[Row]) -> Inputs:
    """The columns of rows that can all be priced."""
    read = read_rows(rows)
    if read.refused:
        number, reason = read.refused[0]
        raise BadRows(f"row {number + 1} cannot be priced: {reason}")
    return read.inputs


def _values(row: Row) -> dict[str, Any]:
    text = {**_DEFAULTS, **{key: value for key, value in row.items() if value not in (None, "")}}
    got: dict[str, Any] = {name: _number(text, name) for name in (
        "layers", "hidden", "heads", "seq", "vocab", "gpus", "micro_batch", "global_batch", "experts", "active_experts",
        "gpus_per_node", "tp", "pp", "cp", "ep", "chunks", "zero")}  # fmt: skip
    for name in ("layers", "hidden", "heads", "seq", "vocab", "gpus", "micro_batch", "global_batch", "gpus_per_node",
                 "tp", "pp", "cp", "ep", "chunks"):  # fmt: skip
        if not 0 < got[name] < float("inf"):
            raise ValueError(f"{name} is {got[name]:g}; expected a number above 0")
    for name in ("gated", "tied", "sequence"):
        got[name] = text[name].strip().lower() in ("1", "1.0", "true", "yes")
    got["kv_heads"] = (_number(text, "kv_heads") if text["kv_heads"] else 0.0) or got["heads"]
    got["ffn"] = (_number(text, "ffn") if text["ffn"] else 0.0) or 4 * got["hidden"]
    got["dp"] = _number(text, "dp") if text["dp"] else got["gpus"] / (got["tp"] * got["pp"] * got["cp"])
    if got["experts"] <= 1:
        got["experts"] = got["active_experts"] = 0.0
    elif not got["active_experts"]:
        got["active_experts"] = 1.0
    got["causal"] = text["kind"] != "encoder"
    got["overlap"] = _number(text, "overlap") if text["overlap"] else float(UNKNOWN)
    got["framework"] = text["framework"]
    got["schedule"] = _word(text["schedule"] or ("1f1b" if got["pp"] > 1 else "none"), SCHEDULES, "schedule")
    got["recompute"] = _word(text["recompute"], RECOMPUTE, "recompute")
    row_scaled = text["precision"] == "fp8" and "rowwise" in text["framework"].lower().replace("-", "")
    got["precision"] = "fp8-rowwise" if row_scaled else _word(text["precision"], PRECISIONS, "precision")
    got["device"] = _device(text)
    _links(got, text)
    return got


def _device(text: Mapping[str, str]) -> Device:
    """The row's device. torchtitan's own figures come from a 500 W part with slower memory, as its reports say."""
    found = device(text["gpu"])
    assumed = "gpu" in text.get("assumed", "").split(";")
    if text["framework"].lower().startswith("torchtitan") and found.name == "H100 SXM5 80GB" and assumed:
        return device("H100 SXM5 96GB 500W")
    return found


_USUAL_LINKS = {"V100": (150, 6.25), "A100": (300, 25), "H100": (450, 50), "H200": (450, 50), "B200": (900, 50),
                "GB200": (900, 50), "B300": (900, 100), "MI250X": (100, 12.5), "MI300X": (448, 50)}  # fmt: skip
"""GB/s for each device inside and between nodes, for rows that do not say (the presets' figures)."""


def _links(got: dict[str, Any], text: Mapping[str, str]) -> None:
    usual = _USUAL_LINKS.get(got["device"].name.split()[0], (32, 12.5))
    for name, default in (("intra_gb_s", usual[0]), ("inter_gb_s", usual[1])):
        got[name] = _number(text, name) if text[name] else float(default)
        if not got[name] > 0:
            raise ValueError(f"{name} is {got[name]:g}; expected GB/s above 0")
    # In an NVL72 rack the fabric joins 72 devices, however few of them a tray (a "node") holds.
    got["gpus_per_node"] = max(got["gpus_per_node"], float(got["device"].domain))


def _columns(parsed: Sequence[Mapping[str, Any]]) -> Inputs:
    def column(name: str) -> np.ndarray:
        return np.array([float(values[name]) for values in parsed])

    def codes(name: str, known: Sequence[str]) -> np.ndarray:
        return np.array([known.index(values[name]) for values in parsed])

    rates = np.array([device_at(values["device"], values["precision"]) for values in parsed])
    axes = {axis: column(axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
    node, gpus = column("gpus_per_node"), column("gpus")
    return Inputs(
        **{name: column(name) for name in (
            "layers", "hidden", "heads", "kv_heads", "ffn", "gated", "vocab", "tied", "experts", "active_experts",
            "causal",
            "chunks", "zero", "sequence", "micro_batch", "global_batch", "overlap")},
        sequence_length=column("seq"),
        peak_flops=rates[:, 0], matmul_flops=rates[:, 1],
        memory_bytes=np.array([values["device"].memory_bytes for values in parsed]),
        memory_bytes_per_s=np.array([values["device"].memory_bytes_per_s for values in parsed]),
        sms=np.array([float(values["device"].sms) for values in parsed]),
        level_ranks=np.stack([np.minimum(node, gpus), np.maximum(node, gpus)]),
        level_bytes_per_s=np.stack([column("intra_gb_s"), column("inter_gb_s")]) * 1e9,
        level_latency_s=np.stack([np.full(len(parsed), NVLINK_HOP_S), np.full(len(parsed), NETWORK_HOP_S)]),
        **axes,
        **{f"{axis}_stride": np.broadcast_to(stride, (len(parsed),)) for axis, stride in strides(axes, ORDER).items()},
        schedule=codes("schedule", SCHEDULES), recompute=codes("recompute", RECOMPUTE),
        precision=codes("precision", PRECISIONS),
    )  # fmt: skip


def _number(text: Mapping[str, str], name: str) -> float:
    try:
        return float(text[name])
    except ValueError:
        raise ValueError(f"{name} is {text[name]!r}; expected a number") from None
    except KeyError:
        raise ValueError(f"{name} is blank; expected a number") from None


def _word(given: str, known: Sequence[str], name: str) -> str:
    word = given.strip().lower()
    if word not in known:
        raise ValueError(f"{name} is {given!r}; expected one of {', '.join(known)}")
    return word
