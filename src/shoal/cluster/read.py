"""Reads a cluster from a TOML file, and refuses an impossible one in a sentence.

name = "ours"
devices = 32
device = "A100 SXM4 80GB"          # or a table: peak_tflops = {bf16 = 312}, memory_gb = 80, memory_gb_s = 2039

[[level]]                          # innermost first
ranks = 8
gb_per_s = 300                     # per device and direction
latency_us = 7

[[level]]
ranks = 4
gb_per_s = 25
latency_us = 40
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from shoal.cluster.cluster import BadCluster, Cluster, Device, Level
from shoal.cluster.devices import device

_TOP = ("name", "devices", "device", "level")
_LEVEL = ("ranks", "gb_per_s", "latency_us")
_DEVICE = ("name", "peak_tflops", "matmul_tflops", "memory_gb", "memory_gb_s", "sms", "domain", "watts")


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCluster(f"{path}: {error.strerror or error}; name a file that can be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCluster(f"{path} is not TOML: {error}") from None
    try:
        return cluster_of(values, name=Path(path).stem)
    except BadCluster as error:
        raise BadCluster(f"{path}: {error}") from None


def cluster_of(values: Mapping[str, Any], *, name: str) -> Cluster:
    """The cluster that a table of values describes."""
    _refuse_unknown("the file", values, _TOP)
    tables = values.get("level", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise BadCluster("it has no [[level]]; give one table for each level of links, innermost first")
    levels = []
    for number, table in enumerate(tables, start=1):
        where = f"level {number}"
        _refuse_unknown(where, table, _LEVEL)
        ranks, latency_us = _whole(where, table, "ranks"), _number(where, table, "latency_us", default=0.0)
        bandwidth = _number(where, table, "gb_per_s")
        if bandwidth <= 0:
            raise BadCluster(f"gb_per_s of {where} is {bandwidth:g}; expected a finite number above 0")
        if latency_us < 0:
            raise BadCluster(f"latency_us of {where} is {latency_us:g}; expected microseconds, at least 0")
        levels.append(Level(ranks=ranks, bytes_per_s=bandwidth * 1e9, latency_s=latency_us * 1e-6))
    product = 1
    for level in levels:
        product *= level.ranks
    devices = _whole("the file", values, "devices", default=product)
    title = values.get("name", name)
    if not isinstance(title, str):
        raise BadCluster(f"name is {title!r}; expected text")
    return Cluster(name=title, device=_device(values.get("device")), levels=tuple(levels), devices=devices)


def _device(given: Any) -> Device:
    if given is None:
        raise BadCluster('it names no device; give device = "A100 SXM4 80GB" or a table [device]')
    if isinstance(given, str):
        return device(given)
    if not isinstance(given, dict):
        raise BadCluster(f"device is {given!r}; expected a name or a table")
    _refuse_unknown("[device]", given, _DEVICE)
    rates = {}
    for key in ("peak_tflops", "matmul_tflops"):
        table = given.get(key, {})
        if not isinstance(table, dict):
            raise BadCluster(f"{key} of [device] is {table!r}; expected a table such as {{bf16 = 312}}")
        rates[key] = {precision: _number(f"{key} of [device]", table, precision) * 1e12 for precision in table}
    return Device(
        name=str(given.get("name", "device")), peak_flops=rates["peak_tflops"], matmul_flops=rates["matmul_tflops"],
        memory_bytes=_number("[device]", given, "memory_gb") * 1e9,
        memory_bytes_per_s=_number("[device]", given, "memory_gb_s") * 1e9,
        sms=_whole("[device]", given, "sms", default=128),
        domain=_whole("[device]", given, "domain", default=0, least=0),
        watts=_number("[device]", given, "watts") if "watts" in given else None,
        origin="the user's file",
    )  # fmt: skip


def _number(where: str, table: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = table.get(key, default)
    if value is None:
        raise BadCluster(f"{where} has no {key}; give a number")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadCluster(f"{key} of {where} is {value!r}; expected a number")
    if not isfinite(value):
        raise BadCluster(f"{key} of {where} is {value:g}; expected a finite number")
    return float(value)


def _whole(where: str, table: Mapping[str, Any], key: str, *, default: int | None = None, least: int = 1) -> int:
    value = _number(where, table, key, default=default)
    if value < least or value != int(value):
        raise BadCluster(f"{key} of {where} is {value:g}; expected a whole number, at least {least}")
    return int(value)


def _refuse_unknown(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise BadCluster(f"{where} has an unknown key {key!r}{meant}; known are {', '.join(known)}")
