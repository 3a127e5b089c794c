"""Which algorithm a collective takes: the cheapest by the alpha-beta model of the links that were measured.

A step costs a latency and a time for each byte; reducing what arrives costs a further time for each byte. The model
is the one of `wire.py`'s formulas with times in place of counts, so what is chosen here is what is counted there.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.comm.calibration import network_here
from shoal.comm.emulate import Emulation, Speed
from shoal.comm.network import DEFAULT, LinkTimes, Network
from shoal.strategy.terms.via import ALL_REDUCE


def network_like(emulation: Emulation, machine: Network = DEFAULT) -> Network:
    """The links of an emulated cluster, on top of what this machine's own cost."""
    own = machine.inside

    def times(speed: Speed) -> LinkTimes:
        return LinkTimes(own.latency_s + speed.latency_s, own.byte_s + 1 / speed.bytes_per_s, own.reduce_byte_s)

    return Network(inside=times(emulation.inside), between=times(emulation.between))


def all_reduce_time(algorithm: str, nbytes: int, ranks: int, per_host: int, network: Network) -> float:
    """Seconds by the model. `per_host` ranks share a host (all of them: one host)."""
    if ranks == 1:
        return 0.0
    if algorithm not in ALL_REDUCE:
        raise ValueError(f"there is no all-reduce called {algorithm!r}; there are {', '.join(ALL_REDUCE)}")
    found: float = ALL_REDUCE[algorithm].seconds(nbytes, ranks, per_host, network)
    return found


@lru_cache(maxsize=4096)
def choose_all_reduce(nbytes: int, ranks: int, per_host: int, network: Network) -> str:
    """The cheapest; of equals the first by name, the same one on all ranks."""
    options = [name for name in ALL_REDUCE if ALL_REDUCE[name].serves(ranks, per_host)]
    return min(options, key=lambda name: all_reduce_time(name, nbytes, ranks, per_host, network))


def on_one_host(axis: str, kind: str, payload_bytes: int, ranks: int) -> str | None:
    """What the shoal backend takes where all ranks share a host: a `Choose` for predictions without a group."""
    if kind == "reduce":
        return "tree"
    if kind != "all_reduce" or ranks == 1:
        return None
    return choose_all_reduce(payload_bytes, ranks, ranks, network_here())
