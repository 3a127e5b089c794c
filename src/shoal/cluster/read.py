"""Reads a cluster from a TOML file, refuses an impossible one in a sentence, and warns of values that are hardly meant.

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

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cluster.cluster import BadCluster, Cluster, Device, Level
from shoal.cluster.devices import device
from shoal.files.toml import BadFile, read_toml

if TYPE_CHECKING:
    from shoal.files.schema import ClusterFile, DeviceTable


SOLD_IN_GIGABITS = (10, 25, 40, 50, 56, 100, 200, 400, 800)
"""Rates by which networks are named, in gigabits a second: the same number of gigabytes is hardly meant."""


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes. Raises BadCluster."""
    try:
        values = read_toml(path)
        from shoal.files.schema import ClusterFile  # pydantic: only where there is a file.
        from shoal.files.table import checked

        return cluster_of(checked(ClusterFile, values), name=Path(path).stem)
    except (BadFile, BadCluster) as error:
        raise BadCluster(f"the cluster file {path}: {error}") from None


def cluster_of(file: ClusterFile, *, name: str) -> Cluster:
    """The cluster that a file describes, with a warning for each value that is hardly meant."""
    levels: list[Level] = []
    doubts: list[str] = []
    for number, table in enumerate(file.level, start=1):
        levels.append(Level(ranks=table.ranks, bytes_per_s=table.bytes_per_s, latency_s=table.latency_s))
        doubts += _doubts_of_links(f"level {number}", table.gb_per_s, levels)
    chosen = device(file.device) if isinstance(file.device, str) else _device(file.device)
    doubts += _doubts_of_device(chosen)
    devices = prod(level.ranks for level in levels) if file.devices is None else file.devices
    title = name if file.name is None else file.name
    return Cluster(name=title, device=chosen, levels=tuple(levels), devices=devices, warnings=tuple(doubts))


def _device(table: DeviceTable) -> Device:
    return Device(
        name=table.name,
        sms=table.sms,
        domain=table.domain,
        watts=table.watts,
        origin="the user's file",
        peak_flops={precision: tflops * 1e12 for precision, tflops in table.peak_tflops.items()},
        matmul_flops={precision: tflops * 1e12 for precision, tflops in table.matmul_tflops.items()},
        memory_bytes=table.memory_bytes,
        memory_bytes_per_s=table.memory_bytes_per_s,
    )


def _doubts_of_links(where: str, gb_per_s: float | None, levels: list[Level]) -> list[str]:
    """What is hardly meant of the last of these levels; `gb_per_s` if its bandwidth was given as a bare number."""
    found, level = [], levels[-1]
    if gb_per_s in SOLD_IN_GIGABITS and len(levels) > 1:
        found.append(
            f"gb_per_s of {where} is {gb_per_s:g} gigabytes a second, {8 * gb_per_s:g} Gb/s; "
            f'for a network of {gb_per_s:g} Gb/s write bandwidth = "{gb_per_s:g} Gb/s"'
        )
    rate_gb_s = level.bytes_per_s / 1e9
    if not 1e-3 <= rate_gb_s <= 2000:
        found.append(f"the bandwidth of {where} is {rate_gb_s:g} GB/s; links known today have 0.001 to 2000")
    if len(levels) > 1 and level.bytes_per_s > 2 * levels[-2].bytes_per_s:
        found.append(f"{where} is faster than the level inside it; levels stand innermost first")
    if level.latency_s > 1:
        found.append(f"the latency of {where} is {level.latency_s:g} s; messages known today take microseconds")
    return found


def _doubts_of_device(device: Device) -> list[str]:
    """What is hardly meant of a device."""
    memory_gb, rate_gb_s = device.memory_bytes / 1e9, device.memory_bytes_per_s / 1e9
    peak_tflops = max(device.peak_flops.values()) / 1e12
    found = []
    if not 0.5 <= memory_gb <= 4000:
        found.append(f"device {device.name!r} has {memory_gb:g} GB of memory; devices known today have 1 to 2000")
    if not 1 <= rate_gb_s <= 30000:
        found.append(f"the memory of device {device.name!r} moves {rate_gb_s:g} GB/s; known today are 10 to 20000")
    if not 0.01 <= peak_tflops <= 1e5:
        found.append(f"device {device.name!r} computes {peak_tflops:g} TFLOP/s; known today are 0.05 to 20000")
    return found
