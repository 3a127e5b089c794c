"""Accelerators by name, as `devices.toml` has them from their datasheets; `device` also finds the nearest spelling."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shoal.cluster.cluster import BadCluster, Device
from shoal.common.suggest import nearest_name
from shoal.files.toml import read_toml

T, GB = 1e12, 1e9


def _device(name: str, row: dict[str, Any]) -> Device:
    halves = ("fp16", "bf16") if row.get("bf16", True) else ("fp16",)
    peaks = {"fp32": row["fp32"], **dict.fromkeys(halves, row["half"])}
    peaks |= {precision: row[precision] for precision in ("tf32", "fp8") if precision in row}
    return Device(
        name=name,
        peak_flops={precision: peak * T for precision, peak in peaks.items()},
        matmul_flops={halves[-1]: row["measured"] * T} if "measured" in row else {},
        memory_bytes=row["memory_gb"] * GB,
        memory_bytes_per_s=row["memory_tb_s"] * T,
        sms=row["sms"],
        origin=row["origin"],
        domain=row.get("domain", 0),
        watts=row.get("watts"),
    )


DEVICES = tuple(_device(name, row) for name, row in read_toml(Path(__file__).with_name("devices.toml")).items())

_CUT_LINKS = {"a800": "a100", "h800": "h100"}
"""Parts sold with narrower links; their products are those of the full part."""
_VENDORS = re.compile(r"\b(nvidia|amd|tesla|instinct|geforce|quadro|gpu)\b")


def device(name: str) -> Device:
    """A device by name: exactly, without regard to case and punctuation, or by its nearest spelling."""
    known = {_folded(each.name): each for each in DEVICES}
    plain = " ".join(_VENDORS.sub(" ", name.lower()).split())
    for cut, full in _CUT_LINKS.items():
        plain = plain.replace(cut, full)
    wanted = _folded(plain)
    if wanted in known:
        return known[wanted]
    family = re.match(r"(?:rtx )?([a-z]*\d+[a-z]*)", plain)
    if family:
        same = [each for each in DEVICES if family.group(1) in each.name.lower().split()]
        same = same or [each for each in DEVICES if each.name.lower().startswith(family.group(1))]
        wanted_memory = re.search(r"(\d+)\s*gi?b?\b", plain)
        sized = [each for each in same if wanted_memory and f" {wanted_memory.group(1)}gb" in each.name.lower()]
        if same:
            return _preferred(sized or same, by_bus="pcie" in plain, half="gcd" in plain)
    near = nearest_name(wanted, known, near=0.75)
    if near is not None:
        return known[near]
    raise BadCluster(f"no device is called {name!r}; known are {', '.join(each.name for each in DEVICES)}")


def _preferred(same: list[Device], *, by_bus: bool, half: bool) -> Device:
    """Of several parts of one name the largest on a module, which is what clusters are built of, by default."""
    return min(
        same,
        key=lambda each: (
            ("PCIe" in each.name) != by_bus,
            "500W" in each.name,
            ("per GCD" in each.name) != half,
            -each.memory_bytes,
        ),
    )


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
