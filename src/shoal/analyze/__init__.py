"""Work, depth and concurrency of a network: how much there is to do, how much of it must wait for something else, and
how many devices each kind of parallelism could therefore use. Formulas alone; only `traced.py` needs torch.
"""

from shoal.analyze.brent import TimeBounds, time_bounds
from shoal.analyze.concurrency import Concurrency, concurrency
from shoal.analyze.network import Layer, Network, NetworkBuilder
from shoal.analyze.operator import Cost, Operator
from shoal.analyze.presets import network_of, preset_names, preset_network
from shoal.analyze.report import report

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
