"""The machine that Shoal runs on as a cluster, from its calibration file."""

from __future__ import annotations

from shoal.cluster.cluster import BadCluster, Cluster, Device, Level
from shoal.comm.calibration import read_calibration_file

THIS = "this"
"""The name of the machine that Shoal runs on; known once it has been calibrated."""


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
    device = Device(
        name="this machine", peak_flops={"fp32": rate}, matmul_flops={"fp32": rate},
        memory_bytes=machine.memory_bytes / machine.ranks, memory_bytes_per_s=machine.memory_bytes_per_s, sms=1,
        origin="shoal calibrate",
    )  # fmt: skip
    link = found.links.inside
    level = Level(ranks=machine.ranks, bytes_per_s=1 / link.byte_s, latency_s=link.latency_s)
    return Cluster(name=THIS, device=device, levels=(level,), devices=machine.ranks)
