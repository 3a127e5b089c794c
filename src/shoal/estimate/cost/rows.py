"""Reads rows of measurements (a CSV as dictionaries) into `Inputs` and the profiles of their frameworks.

What cannot be estimated is named with its reason and set aside, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.cluster import BadCluster, Device, device
from shoal.cluster.presets import NETWORK_HOP_S, NVLINK_HOP_S
from shoal.estimate.cost import words
from shoal.estimate.cost.inputs import (
    ORDER,
    PRECISIONS,
    RECOMPUTE,
    SCHEDULES,
    UNKNOWN,
    Inputs,
    device_at,
    strides,
)
from shoal.estimate.cost.profile import Profile
from shoal.estimate.cost.profiles import profile_for

Row = Mapping[str, str]

NEEDED = ("layers", "hidden", "heads", "seq", "vocab", "gpu", "gpus", "micro_batch", "global_batch")
"""Columns without which nothing can be said."""

_DEFAULTS = {
    "kv_heads": "",
    "ffn": "",
    "gated": "0",
    "tied": "0",
    "experts": "0",
    "active_experts": "0",
    "gpus_per_node": "8",
    "intra_gb_s": "",
    "inter_gb_s": "",
    "dp": "",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "ep": "1",
    "chunks": "1",
    "schedule": "",
    "zero": "0",
    "sequence": "0",
    "recompute": "none",
    "precision": "bf16",
    "overlap": "",
    "framework": "",
    "kind": "decoder",
    # Blank in some tables, and of little weight: GPT-2's vocabulary in full tiles; heads of 128 and one pass a step
    # follow below.
    "vocab": "50304",
    "heads": "",
    "micro_batch": "1",
    "global_batch": "",
}


class BadRows(ValueError):
    """A file that lacks what every prediction needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Rows that can be estimated, and those that cannot with the reason."""

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
            profile = profile_for(
                values["framework"],
                device=values["device"].name,
                precision=values["precision"],
                schedule=row.get("schedule") or "",
                young=_young(values),
            )
        except (ValueError, BadCluster) as error:
            refused.append((number, str(error)))
            continue
        parsed.append(values)
        priced.append(number)
        index.append(profiles.setdefault(profile, len(profiles)))
    if not parsed:
        raise BadRows(f"no row can be estimated; the first says: {refused[0][1]}")
    return Read(
        inputs=_columns(parsed),
        profiles=tuple(profiles),
        profile_index=np.array(index),
        priced=tuple(priced),
        refused=tuple(refused),
    )


def inputs_from_rows(rows: Sequence[Row]) -> Inputs:
    """The columns of rows that can all be priced."""
    read = read_rows(rows)
    if read.refused:
        number, reason = read.refused[0]
        raise BadRows(f"row {number + 1} cannot be estimated: {reason}")
    return read.inputs


def _values(row: Row) -> dict[str, Any]:
    text = {**_DEFAULTS, **{key: value.strip() for key, value in row.items() if value and value.strip()}}
    got: dict[str, Any] = {name: _number(text, name) for name in ("experts", "active_experts")}
    for name in (
        "layers",
        "hidden",
        "seq",
        "vocab",
        "gpus",
        "micro_batch",
        "gpus_per_node",
        "tp",
        "pp",
        "cp",
        "ep",
        "chunks",
    ):
        got[name] = _positive(text, name)
    for name in ("gated", "tied", "sequence"):
        got[name] = text[name].strip().lower() in ("1", "1.0", "true", "yes", "on")
    got["heads"] = _positive(text, "heads") if text["heads"] else max(1.0, round(got["hidden"] / 128))
    got["kv_heads"] = (_number(text, "kv_heads") if text["kv_heads"] else 0.0) or got["heads"]
    got["ffn"] = (_number(text, "ffn") if text["ffn"] else 0.0) or 4 * got["hidden"]
    _replicas(got, text)
    got["global_batch"] = _positive(text, "global_batch") if text["global_batch"] else got["dp"] * got["micro_batch"]
    if got["experts"] <= 1:
        got["experts"] = got["active_experts"] = 0.0
    elif not got["active_experts"]:
        got["active_experts"] = 1.0
    got["causal"] = "decoder" in text["kind"].lower() or "encoder" not in text["kind"].lower()
    said = {"true": "1", "yes": "1", "false": "0", "no": "0"}.get(text["overlap"].strip().lower(), text["overlap"])
    got["overlap"] = _number({"overlap": said}, "overlap") if said else float(UNKNOWN)
    got["framework"] = text["framework"]
    got["ulysses"] = "ulysses" in text["framework"].lower()
    got["zero"] = words.zero(text["zero"])
    got["schedule"], got["chunks"] = words.schedule(text["schedule"], pp=got["pp"], chunks=got["chunks"])
    got["recompute"] = words.recompute(text["recompute"])
    got["device"] = _device(text, got["gpus_per_node"])
    # Rows may say only in the framework's name that scales are by rows.
    scales = "-rowwise" if "rowwise" in text["framework"].lower().replace("-", "") else ""
    got["precision"] = words.precision(text["precision"] + scales, has_fp8="fp8" in got["device"].peak_flops)
    _links(got, text)
    return got


def _young(got: Mapping[str, Any]) -> bool:
    """Whether the model is of the time of fused attention: gated, with shared keys, or with long sequences."""
    return bool(got["gated"] or got["kv_heads"] < got["heads"] or got["seq"] > 4096)


def _replicas(got: dict[str, Any], text: Mapping[str, str]) -> None:
    """dp, held against the number of devices; and ep, which cannot span more ranks than share the experts."""
    rest = got["tp"] * got["pp"] * got["cp"]
    left = got["gpus"] / rest
    dp = _positive(text, "dp") if text["dp"] else left
    # Some count only the replicas of the experts, some leave out a level: the number of devices is the surer figure.
    got["dp"] = left if left >= 1 and abs(dp - left) > 1e-6 * left else dp
    got["ep"] = min(got["ep"], max(1.0, got["dp"] * got["cp"]))


def _device(text: Mapping[str, str], gpus_per_node: float) -> Device:
    """The row's device. torchtitan's own figures come from a 500 W part with slower memory, as its reports say; a node
    has four modules of MI250X, so where it has eight devices each is a half.
    """
    found = device(text["gpu"])
    assumed = "gpu" in text.get("assumed", "").split(";")
    if text["framework"].lower().startswith("torchtitan") and found.name == "H100 SXM5 80GB" and assumed:
        return device("H100 SXM5 96GB 500W")
    if found.name.startswith("MI250X") and gpus_per_node >= 8:
        return device("MI250X (per GCD)")
    return found


_USUAL_LINKS = {
    "V100": (150, 6.25),
    "A100": (300, 25),
    "H100": (450, 50),
    "H20": (450, 50),
    "GH200": (450, 50),
    "H200": (450, 50),
    "B200": (900, 50),
    "GB200": (900, 50),
    "B300": (900, 100),
    "GB300": (900, 100),
    "MI250X": (100, 12.5),
    "MI300X": (448, 50),
    "MI325X": (448, 50),
    "MI355X": (537, 50),
}
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
        **{
            name: column(name)
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "ffn",
                "gated",
                "vocab",
                "tied",
                "experts",
                "active_experts",
                "causal",
                "chunks",
                "zero",
                "ulysses",
                "sequence",
                "micro_batch",
                "global_batch",
                "overlap",
            )
        },
        sequence_length=column("seq"),
        peak_flops=rates[:, 0],
        matmul_flops=rates[:, 1],
        memory_bytes=np.array([values["device"].memory_bytes for values in parsed]),
        memory_bytes_per_s=np.array([values["device"].memory_bytes_per_s for values in parsed]),
        sms=np.array([float(values["device"].sms) for values in parsed]),
        level_ranks=np.stack([np.minimum(node, gpus), np.maximum(node, gpus)]),
        level_bytes_per_s=np.stack([column("intra_gb_s"), column("inter_gb_s")]) * 1e9,
        level_latency_s=np.stack([np.full(len(parsed), NVLINK_HOP_S), np.full(len(parsed), NETWORK_HOP_S)]),
        **axes,
        **{f"{axis}_stride": np.broadcast_to(stride, (len(parsed),)) for axis, stride in strides(axes, ORDER).items()},
        schedule=codes("schedule", SCHEDULES),
        recompute=codes("recompute", RECOMPUTE),
        precision=codes("precision", PRECISIONS),
    )


def _positive(text: Mapping[str, str], name: str) -> float:
    found = _number(text, name)
    if not 0 < found < float("inf"):
        raise ValueError(f"{name} is {found:g}; expected a number above 0")
    return found


def _number(text: Mapping[str, str], name: str) -> float:
    try:
        return float(text[name])
    except ValueError:
        raise ValueError(f"{name} is {text[name]!r}; expected a number") from None
    except KeyError:
        raise ValueError(f"{name} is blank; expected a number") from None
