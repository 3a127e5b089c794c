"""Where to train: devices, the links that join them, presets, and files of users."""

from shoal.cluster.cluster import BadCluster, Cluster, Device, Level
from shoal.cluster.devices import DEVICES, device
from shoal.cluster.presets import PRESETS, cluster
from shoal.cluster.read import read_cluster

__all__ = ["BadCluster", "Cluster", "DEVICES", "Device", "Level", "PRESETS", "cluster", "device", "read_cluster"]
