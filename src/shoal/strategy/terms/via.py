"""The paths on which the replicas of one level of data parallelism exchange: a collective, a server, or
memory they share.
"""

from __future__ import annotations

from shoal.strategy.terms.arguments import LARGEST_SIZE, choice, flag, whole
from shoal.strategy.terms.numerals import counted
from shoal.strategy.terms.term import Term


class ViaTerm(Term):
    """The path between replicas."""

    family = "via"
    where = "any links"

    def pattern(self) -> str:
        """The place on the communication axis of the taxonomy."""
        raise TypeError(f"{type(self).__name__} has no pattern")


class allreduce(ViaTerm):
    """A collective among equals; "auto" lets the size of the message choose the algorithm."""

    algorithm: str = choice("auto", "ring", "tree", "butterfly", "rabenseifner", "hierarchical", default="auto")

    title = "all-reduce: ring, tree, butterfly, Rabenseifner, hierarchical"

    def words(self) -> str:
        how = {
            "auto": "by all-reduce, its algorithm chosen by the size of the message",
            "ring": "by all-reduce around a ring",
            "tree": "by all-reduce up and down a tree",
            "butterfly": "by all-reduce in a butterfly of exchanges",
            "rabenseifner": "by all-reduce in halves and doubles (Rabenseifner)",
            "hierarchical": "by all-reduce inside each host first, then between hosts",
        }
        return how[self.algorithm]

    def pattern(self) -> str:
        if self.algorithm in ("tree", "hierarchical"):
            return self.algorithm
        return "ring/butterfly"


class ps(ViaTerm):
    """Parameter servers: the model in `shards` parts, on ranks of their own or `colocated` with workers."""

    shards: int = whole(1, LARGEST_SIZE)
    colocated: bool = flag(default=False, kw_only=True)

    title = "parameter server: single, sharded, co-located"

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
