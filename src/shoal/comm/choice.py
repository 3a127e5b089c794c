"""Which algorithm a collective takes: the cheapest by the alpha-beta model of the links that were measured.

A step costs a latency and a time for each byte; reducing what arrives costs a further time for each byte. The model
is the one of `wire.py`'s formulas with times in place of counts, so what is chosen here is what is counted there.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2

from shoal.comm.calibration import network_here
from shoal.comm.emulate import Emulation, Speed
from shoal.comm.network import DEFAULT, LinkTimes, NetworkTimes

ALL_REDUCE = ("ring", "tree", "butterfly", "rabenseifner", "hierarchical")

ONE_MEMORY = 1.5
"""A butterfly sends and takes in the same memory: what arrives has to wait until what it replaces has left."""


def network_like(emulation: Emulation, machine: NetworkTimes = DEFAULT) -> NetworkTimes:
    """The links of an emulated cluster, on top of what this machine's own cost."""
    own = machine.inside

    def times(speed: Speed) -> LinkTimes:
        return LinkTimes(own.latency_s + speed.latency_s, own.byte_s + 1 / speed.bytes_per_s, own.reduce_byte_s)

    return NetworkTimes(inside=times(emulation.inside), between=times(emulation.between))


def all_reduce_time(algorithm: str, nbytes: int, ranks: int, per_host: int, network: NetworkTimes) -> float:
    """Seconds by the model. `per_host` ranks share a host (all of them: one host)."""
    if ranks == 1:
        return 0.0
    hosts = ceil(ranks / per_host)
    link = network.slowest(hosts)
    steps = ceil(log2(ranks))
    folds = 0 if ranks & (ranks - 1) == 0 else 1
    latency, move, reduce = link.latency_s, nbytes * link.byte_s, nbytes * link.reduce_byte_s
    share = (ranks - 1) / ranks
    if algorithm == "ring":
        return 2 * (ranks - 1) * latency + 2 * share * move + share * reduce
    if algorithm == "tree":
        return 2 * steps * (latency + move) + steps * reduce
    if algorithm == "butterfly":
        whole = int(log2(ranks))
        return (whole + 2 * folds) * latency + (whole * ONE_MEMORY + 2 * folds) * move + (whole + folds) * reduce
    if algorithm == "rabenseifner":
        whole = int(log2(ranks))
        part = 1 - 1 / (1 << whole)
        return (2 * whole + 2 * folds) * latency + (2 * part + 2 * folds) * move + (part + folds) * reduce
    if algorithm == "hierarchical":
        inner = all_reduce_time("ring", nbytes, per_host, per_host, network)
        return inner + all_reduce_time("ring", nbytes // per_host, hosts, 1, network)
    raise ValueError(f"there is no all-reduce called {algorithm!r}; there are {', '.join(ALL_REDUCE)}")


@lru_cache(maxsize=4096)
def choose_all_reduce(nbytes: int, ranks: int, per_host: int, network: NetworkTimes) -> str:
    """The cheapest; of equals the one with the fewest messages."""
    options = ["butterfly", "rabenseifner", "ring", "tree"]
    if 1 < per_host < ranks and ranks % per_host == 0:
        options.append("hierarchical")
    return min(options, key=lambda name: all_reduce_time(name, nbytes, ranks, per_host, network))


def on_one_host(axis: str, kind: str, payload_bytes: int, ranks: int) -> str | None:
    """What the shoal backend takes where all ranks share a host: a `Choose` for predictions without a group."""
    if kind == "reduce":
        return "tree"
    if kind != "all_reduce" or ranks == 1:
        return None
    return choose_all_reduce(payload_bytes, ranks, ranks, network_here())
