"""Clusters by name: nodes as their makers describe them, as many as the user asks for.

Bandwidths are bytes a second for each device in one direction. Where a node's cards are shared, each device has its
share. Latencies are of one hop of a ring, as they appear inside collectives (fitted, see `estimate/cost/constants.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cluster.calibrated import THIS, cluster_here
from shoal.cluster.cluster import BadCluster, Cluster, Level
from shoal.cluster.devices import device
from shoal.common.suggest import did_you_mean

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
    inter_gb_s: float
    origin: str
    nodes: int = 16
    inter_hop_s: float = NETWORK_HOP_S


PRESETS: dict[str, Preset] = {
    "dgx-1-v100": Preset(device="V100 SXM2 16GB", node=8, intra_gb_s=150, inter_gb_s=6.25,
                         origin="NVIDIA DGX-1 V100: NVLink2 300 GB/s both ways, 4 EDR cards of 100 Gb/s for 8 devices"),
    "dgx-1-v100-32": Preset(device="V100 SXM2 32GB", node=8, intra_gb_s=150, inter_gb_s=6.25, origin="as dgx-1-v100"),
    "dgx-2": Preset(device="V100 SXM3 32GB (DGX-2)", node=16, intra_gb_s=150, inter_gb_s=6.25,
                    origin="NVIDIA DGX-2: NVSwitch, 8 EDR cards for 16 devices"),
    "lassen": Preset(device="V100 SXM2 16GB", node=4, intra_gb_s=75, inter_gb_s=6.25, nodes=792,
                     origin="LLNL Lassen: 4 V100 a node, NVLink2 with 3 links a pair, 2 EDR cards of 100 Gb/s"),
    "thetagpu": Preset(device="A100 SXM4 40GB", node=8, intra_gb_s=300, inter_gb_s=25, nodes=24,
                       origin="ALCF ThetaGPU: DGX A100 40 GB, 8 HDR cards of 200 Gb/s"),
    "dgx-a100": Preset(device="A100 SXM4 80GB", node=8, intra_gb_s=300, inter_gb_s=25,
                       origin="NVIDIA DGX A100 80 GB: NVLink3 600 GB/s both ways, 8 HDR cards of 200 Gb/s"),
    "dgx-a100-40": Preset(device="A100 SXM4 40GB", node=8, intra_gb_s=300, inter_gb_s=25, origin="as dgx-a100"),
    "p4d": Preset(device="A100 SXM4 40GB", node=8, intra_gb_s=300, inter_gb_s=6.25,
                  origin="Amazon EC2 p4d: 4 EFA cards of 100 Gb/s for 8 devices"),
    "dgx-h100": Preset(device="H100 SXM5 80GB", node=8, intra_gb_s=450, inter_gb_s=50,
                       origin="NVIDIA DGX H100: NVLink4 900 GB/s both ways, 8 NDR cards of 400 Gb/s"),
    "dgx-h200": Preset(device="H200 SXM 141GB", node=8, intra_gb_s=450, inter_gb_s=50, origin="NVIDIA DGX H200"),
    "dgx-b200": Preset(device="B200 SXM", node=8, intra_gb_s=900, inter_gb_s=50,
                       origin="NVIDIA DGX B200: NVLink5 1.8 TB/s both ways, 8 NDR cards of 400 Gb/s"),
    "gb200-nvl72": Preset(device="GB200 (per GPU)", node=72, intra_gb_s=900, inter_gb_s=50, nodes=8,
                          origin="NVIDIA GB200 NVL72: 72 devices in one NVLink5 domain, a card of 400 Gb/s each"),
    "frontier": Preset(device="MI250X (per GCD)", node=8, intra_gb_s=100, inter_gb_s=12.5, nodes=9408,
                       origin="OLCF Frontier: 8 GCDs a node, xGMI 50 to 200 GB/s a pair, 4 cards of 200 Gb/s"),
    "mi300x": Preset(device="MI300X", node=8, intra_gb_s=448, inter_gb_s=50,
                     origin="AMD MI300X platform: 7 xGMI links of 64 GB/s, 8 cards of 400 Gb/s"),
    "cloud-10gbe": Preset(device="A10G", node=1, intra_gb_s=1.25, inter_gb_s=1.25, inter_hop_s=ETHERNET_HOP_S,
                          origin="hosts of one A10G joined by Ethernet of 10 Gb/s"),
    "cloud-t4-10gbe": Preset(device="T4", node=4, intra_gb_s=12, inter_gb_s=0.3125, inter_hop_s=ETHERNET_HOP_S,
                             origin="hosts of four T4 on PCIe 3, joined by Ethernet of 10 Gb/s"),
}  # fmt: skip

ALIASES = {
    "v100": "dgx-1-v100", "v100-16": "dgx-1-v100", "v100-32": "dgx-1-v100-32", "a100": "dgx-a100",
    "a100-80": "dgx-a100",
    "a100-40": "dgx-a100-40", "h100": "dgx-h100", "h200": "dgx-h200", "b200": "dgx-b200", "gb200": "gb200-nvl72",
    "mi250x": "frontier", "ethernet": "cloud-10gbe", "10gbe": "cloud-10gbe",
}  # fmt: skip


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
    levels = (
        Level(ranks=preset.node, bytes_per_s=preset.intra_gb_s * 1e9, latency_s=NVLINK_HOP_S),
        Level(ranks=preset.nodes, bytes_per_s=preset.inter_gb_s * 1e9, latency_s=preset.inter_hop_s),
    )
    full = Cluster(name=key, device=device(preset.device), levels=levels, devices=preset.node * preset.nodes)
    return full if devices is None else full.resized(devices)
