"""Work, depth and concurrency of a network: how much there is to do, how much of it must wait for something else, and
how many devices each kind of parallelism could therefore use. Formulas alone; only `traced.py` needs torch.
"""

from shoal.analysis.brent import TimeBounds, time_bounds
from shoal.analysis.concurrency import Concurrency, concurrency
from shoal.analysis.network import Layer, Network, NetworkBuilder
from shoal.analysis.operator import Cost, Operator
from shoal.analysis.presets import network_of, preset_names, preset_network
from shoal.analysis.report import report

__all__ = [
    "Concurrency",
    "Cost",
    "Layer",
    "Network",
    "NetworkBuilder",
    "Operator",
    "TimeBounds",
    "concurrency",
    "network_of",
    "preset_names",
    "preset_network",
    "report",
    "time_bounds",
]
