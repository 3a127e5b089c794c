"""Clusters by name: the nodes of `clusters.toml`, as many as the user asks for, or this machine as it was calibrated.

Latencies are of one hop of a ring, as they appear inside collectives (fitted, see `estimate/cost/constants.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.cluster import BadCluster, Cluster, Device, Level
from shoal.cluster.devices import device
from shoal.comm.calibration import read_calibration_file
from shoal.common.suggest import did_you_mean
from shoal.files.toml import read_toml

THIS = "this"
"""The name of the machine that Shoal runs on; known once it has been calibrated."""
NVLINK_HOP_S = 7e-6
"""A hop inside a node (fitted: collectives of 2 to 8 ranks, nccl-tests on A100, H100, H200 and B200)."""
NETWORK_HOP_S = 25e-6
"""A hop between nodes over InfiniBand or EFA (fitted: all-reduce over 2 to 64 nodes)."""
ETHERNET_HOP_S = 100e-6
"""A hop between hosts over TCP (typical of a cloud's network; `shoal calibrate` measures one's own)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A kind of node and the network between nodes."""

    device: str
    node: int
    intra_gb_s: float
    """Of one device in one direction."""
    inter_gb_s: float
    origin: str
    nodes: int = 16
    ethernet: bool = False
    """Nodes are joined by Ethernet, not by InfiniBand or EFA."""


PRESETS = {name: Preset(**row) for name, row in read_toml(Path(__file__).with_name("clusters.toml")).items()}

ALIASES = {
    "v100": "dgx-1-v100",
    "v100-16": "dgx-1-v100",
    "v100-32": "dgx-1-v100-32",
    "a100": "dgx-a100",
    "a100-80": "dgx-a100",
    "a100-40": "dgx-a100-40",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
    "gb200": "gb200-nvl72",
    "mi250x": "frontier",
    "ethernet": "cloud-10gbe",
    "10gbe": "cloud-10gbe",
}


def cluster(name: str, *, devices: int | None = None) -> Cluster:
    """A preset by name, with that many devices (by default its usual number)."""
    if name == THIS:
        found = cluster_here()
        return found if devices is None else found.resized(devices)
    key = ALIASES.get(name.lower(), name.lower())
    if key not in PRESETS:
        names = [*PRESETS, *ALIASES, THIS]
        raise BadCluster(
            f"no cluster is called {name!r}{did_you_mean(name, names)}; "
            f"known are {', '.join([*PRESETS, THIS])}, or give a TOML file"
        )
    preset = PRESETS[key]
    hop_s = ETHERNET_HOP_S if preset.ethernet else NETWORK_HOP_S
    levels = (
        Level(ranks=preset.node, bytes_per_s=preset.intra_gb_s * 1e9, latency_s=NVLINK_HOP_S),
        Level(ranks=preset.nodes, bytes_per_s=preset.inter_gb_s * 1e9, latency_s=hop_s),
    )
    full = Cluster(name=key, device=device(preset.device), levels=levels, devices=preset.node * preset.nodes)
    return full if devices is None else full.resized(devices)


def cluster_here() -> Cluster:
    """This host: a device is one rank's share of it.

    Raises:
        BadCluster: It was not calibrated, or only its links were.
        WrongCalibration: The calibration file cannot be right.
    """
    found = read_calibration_file()
    machine = found.machine if found is not None else None
    if found is None or machine is None or "linear" not in machine.products:
        raise BadCluster("this machine has not been calibrated; run `shoal calibrate` first")
    rate = machine.products["linear"].forward.flops
    part = Device(
        name="this machine",
        peak_flops={"fp32": rate},
        matmul_flops={"fp32": rate},
        memory_bytes=machine.memory_bytes / machine.ranks,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        sms=1,
        origin="shoal calibrate",
    )
    link = found.links.inside
    level = Level(ranks=machine.ranks, bytes_per_s=1 / link.byte_s, latency_s=link.latency_s)
    return Cluster(name=THIS, device=part, levels=(level,), devices=machine.ranks)
