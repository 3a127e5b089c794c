"""The paths on which the replicas of one level of data parallelism exchange: a collective, a server, or
memory they share.
"""

from __future__ import annotations

from shoal.strategy.terms.arguments import LARGEST_SIZE, choice, flag, integer
from shoal.strategy.terms.numerals import counted
from shoal.strategy.terms.term import Techniques, Term


class ViaTerm(Term):
    """The path between replicas."""

    family = "via"
    where = "any links"

    def pattern(self) -> str:
        """The place on the communication axis of the taxonomy."""
        raise TypeError(f"{type(self).__name__} has no pattern")


ALL_REDUCE = Techniques("all_reduce")
"""The algorithms of an all-reduce by name (`comm/collectives/algorithms.py`)."""


class allreduce(ViaTerm):
    """A collective among equals; "auto" lets the size of the message choose the algorithm."""

    algorithm: str = choice("auto", *ALL_REDUCE, default="auto")

    title = f"all-reduce: {', '.join(ALL_REDUCE)}"

    def words(self) -> str:
        if self.algorithm == "auto":
            return "by all-reduce, its algorithm chosen by the size of the message"
        return f"by all-reduce {ALL_REDUCE[self.algorithm].words}"

    def pattern(self) -> str:
        return "ring/butterfly" if self.algorithm == "auto" else str(ALL_REDUCE[self.algorithm].pattern)

    @property
    def by_hosts(self) -> bool:
        """Whether it works in groups, the ranks of a host."""
        return self.algorithm != "auto" and bool(ALL_REDUCE[self.algorithm].by_hosts)


class ps(ViaTerm):
    """Parameter servers: the model in `shards` parts, on ranks of their own or `colocated` with workers.

    With `levels=r` the replicas form r regions (a host, or a site, each). The ranks of a region are its own servers,
    in front of the shards: each sums a slice of the region's gradients, pushes it once for all of them, and hands the
    slice that it pulls on. `dp(8, sync=asp(), via=ps(2, levels=4))` is written out as
    `dp(4, sync=asp(), via=ps(2)) * dp(2)`: regions are asynchronous, replicas of one are not.
    """

    shards: int = integer(1, LARGEST_SIZE, sample=1)
    colocated: bool = flag(default=False, kw_only=True)
    levels: int = integer(1, LARGEST_SIZE, default=1, kw_only=True)

    title = "parameter server: single, sharded, co-located, hierarchical"

    def words(self) -> str:
        if self.colocated:
            return f"through {counted(self.shards, 'server shard')} that live on the workers themselves"
        return (
            f"through {counted(self.shards, 'parameter server')} on ranks of "
            f"{'its' if self.shards == 1 else 'their'} own"
        )

    def pattern(self) -> str:
        if self.colocated:
            return "co-located PS"
        return "single PS" if self.shards == 1 else "sharded PS"


class shared(ViaTerm):
    """One copy of the weights in memory that all replicas map; so all of them are on one host."""

    title = "shared memory"
    where = "one host"

    def words(self) -> str:
        return "through one copy of the weights in memory that all replicas share"

    def pattern(self) -> str:
        return "shared memory"
