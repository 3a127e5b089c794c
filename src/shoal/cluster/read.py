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

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cluster.cluster import BadCluster, Cluster, Device, Level
from shoal.cluster.devices import device
from shoal.cluster.plausible import doubts_of_device, doubts_of_links
from shoal.files.toml import BadFile, read_toml

if TYPE_CHECKING:
    from shoal.files.schema import ClusterFile, DeviceTable


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
        doubts += doubts_of_links(f"level {number}", table.gb_per_s, levels)
    chosen = device(file.device) if isinstance(file.device, str) else _device(file.device)
    doubts += doubts_of_device(chosen)
    devices = prod(level.ranks for level in levels) if file.devices is None else file.devices
    title = name if file.name is None else file.name
    return Cluster(name=title, device=chosen, levels=tuple(levels), devices=devices, warnings=tuple(doubts))


def _device(table: DeviceTable) -> Device:
    return Device(
        name=table.name, sms=table.sms, domain=table.domain, watts=table.watts, origin="the user's file",
        peak_flops={precision: tflops * 1e12 for precision, tflops in table.peak_tflops.items()},
        matmul_flops={precision: tflops * 1e12 for precision, tflops in table.matmul_tflops.items()},
        memory_bytes=table.memory_bytes, memory_bytes_per_s=table.memory_bytes_per_s,
    )  # fmt: skip
