"""The algorithms of an all-reduce, by the names that `via=allreduce(...)` has for them."""

from __future__ import annotations

from collections.abc import Callable

from shoal.comm.collectives.butterfly import butterfly_all_reduce
from shoal.comm.collectives.hierarchical import hierarchical_all_reduce
from shoal.comm.collectives.rabenseifner import rabenseifner_all_reduce
from shoal.comm.collectives.ring import ring_all_reduce
from shoal.comm.collectives.tree import tree_all_reduce
from shoal.comm.peers import Peers, Steps
from shoal.comm.vector import Operation, Vector

ALL_REDUCE: dict[str, Callable[[Peers, Vector, Operation], Steps]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "butterfly": butterfly_all_reduce,
    "rabenseifner": rabenseifner_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}
