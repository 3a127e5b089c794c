"""Reads a cluster from a TOML file, and refuses an impossible one in a sentence.

name = "ours"
devices = 32
device = "A100 SXM4 80GB"          # or a table [device]: docs/clusters.md

[[level]]                          # innermost first
ranks = 8
bandwidth = "300 GB/s"             # of one device, in one direction
latency = "7 us"

[[level]]
ranks = 4
bandwidth = "200 Gb/s"             # b is a bit, B a byte
latency = "40 us"

Bare numbers keep their unit in the key, as before: gb_per_s (gigabytes), latency_us, memory_gb, memory_gb_s.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from shoal.cluster.cluster import BadCluster, Cluster, Device, Level
from shoal.cluster.devices import device
from shoal.cluster.plausible import doubts_of_device, doubts_of_links
from shoal.cluster.quantities import BadQuantity, duration, rate, size

_TOP = ("name", "devices", "device", "level")
_LEVEL = ("ranks", "bandwidth", "latency", "gb_per_s", "latency_us")
_DEVICE = ("name", "peak_tflops", "matmul_tflops", "memory", "memory_bandwidth", "memory_gb", "memory_gb_s", "sms",
           "domain", "watts")  # fmt: skip


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
    levels: list[Level] = []
    doubts: list[str] = []
    for number, table in enumerate(tables, start=1):
        where = f"level {number}"
        _refuse_unknown(where, table, _LEVEL)
        ranks = _whole(where, table, "ranks")
        bytes_per_s = _quantity(where, table, "bandwidth", rate, "gb_per_s", 1e9)
        latency_s = _quantity(where, table, "latency", duration, "latency_us", 1e-6, default=0.0)
        if bytes_per_s <= 0:
            given = "bandwidth" if "bandwidth" in table else "gb_per_s"
            raise BadCluster(f"{given} of {where} is {table[given]}; expected a finite number above 0")
        if latency_s < 0:
            raise BadCluster(f"latency_us of {where} is {latency_s * 1e6:g}; expected microseconds, at least 0")
        levels.append(Level(ranks=ranks, bytes_per_s=bytes_per_s, latency_s=latency_s))
        doubts += doubts_of_links(where, table.get("gb_per_s"), levels)
    product = 1
    for level in levels:
        product *= level.ranks
    devices = _whole("the file", values, "devices", default=product)
    title = values.get("name", name)
    if not isinstance(title, str):
        raise BadCluster(f"name is {title!r}; expected text")
    chosen = _device(values.get("device"))
    doubts += doubts_of_device(chosen)
    return Cluster(name=title, device=chosen, levels=tuple(levels), devices=devices, warnings=tuple(doubts))


def _quantity(
    where: str, table: Mapping[str, Any], key: str, read: Callable[[object], float], bare: str, scale: float,
    *, default: float | None = None,
) -> float:  # fmt: skip
    """A quantity with its unit, or a bare number under the key that names its unit."""
    if key not in table:
        if bare not in table and default is None:
            raise BadCluster(f"{where} has no {key}; give one with its unit, such as {_EXAMPLES[key]}")
        return _number(where, table, bare, default=default) * scale
    if bare in table:
        raise BadCluster(f"{where} has both {key} and {bare}; give one of them")
    try:
        return read(table[key])
    except BadQuantity as error:
        raise BadCluster(f"{key} of {where}: {error}") from None


_EXAMPLES = {
    "bandwidth": '"200 Gb/s"', "latency": '"7 us"', "memory": '"80 GB"', "memory_bandwidth": '"2039 GB/s"',
}  # fmt: skip


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
        memory_bytes=_quantity("[device]", given, "memory", size, "memory_gb", 1e9),
        memory_bytes_per_s=_quantity("[device]", given, "memory_bandwidth", rate, "memory_gb_s", 1e9),
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
