"""What an all-reduce algorithm is: its messages as a generator, its cost on the wire, and its time by the alpha-beta
model.

The base of every file in `technique/all_reduce`. An algorithm has no state. Files are read wherever a strategy names
one, so what needs torch is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from shoal.comm.wire import Sent
from shoal.strategy.terms import via

if TYPE_CHECKING:
    from shoal.comm.network import LinkTimes, Network
    from shoal.comm.peers import Peers, Steps
    from shoal.comm.vector import Operation, Vector


class AllReduce:
    """One algorithm. `via=allreduce("name")` names it by its file."""

    words: ClassVar[str]
    """How it goes, after "by all-reduce"."""
    pattern: ClassVar[str] = "ring/butterfly"
    """Its place on the communication axis of the taxonomy."""
    by_hosts: ClassVar[bool] = False
    """Whether its messages depend on who shares a host with whom."""

    def steps(self, peers: Peers, x: Vector, operation: Operation) -> Steps:
        """The messages of one rank; in place, and the same numbers to the bit on all ranks."""
        raise TypeError(f"{type(self).__name__} does not say what is sent")

    def sent(self, nbytes: int, ranks: int, hosts: tuple[int, ...] = ()) -> Sent:
        """Messages and bytes that a rank sends, the mean over ranks: messages rounded up, bytes down. `hosts`: ranks on
        each, for algorithms that go by hosts."""
        raise TypeError(f"{type(self).__name__} does not say how much it sends")

    def serves(self, ranks: int, per_host: int) -> bool:
        """Whether it may be chosen for such a group."""
        return True

    def seconds(self, nbytes: int, ranks: int, per_host: int, network: Network) -> float:
        """By the model, for more than one rank. `per_host` ranks share a host (all of them: one host)."""
        return self.link_seconds(nbytes, ranks, network.slowest(ceil(ranks / per_host)))

    def link_seconds(self, nbytes: int, ranks: int, link: LinkTimes) -> float:
        """The same, all messages taking one kind of link."""
        raise TypeError(f"{type(self).__name__} does not say how long it takes")


ALL_REDUCE: Mapping[str, AllReduce] = via.ALL_REDUCE
"""The algorithms by name."""
