"""What one collective costs on the wire: messages and bytes that a rank sends, as closed formulas.

The ledger enters these figures for every collective it sees and `estimate/traffic.py` predicts with the same
ones, so the algorithm behind each kind is fixed here, once; those of an all-reduce are files of
`technique/all_reduce`. The kernel's own byte counters are held against
them in tests/distributed/test_two_hosts.py.

`payload_bytes` is the whole vector: the reduced tensor for all-reduce, the input of reduce-scatter, the output
of all-gather. Where ranks send different amounts (a tree, a root) the figure is the mean over ranks, rounded down.
An all-to-all with uneven parts is exact for each rank: its payload is that of an even one with the same bytes sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from shoal.strategy.terms.via import ALL_REDUCE


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank puts on the wire."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class OnHosts:
    """An all-reduce whose messages depend on who shares a host with whom."""

    name: str
    hosts: tuple[int, ...]
    """Ranks on each."""


Algorithm = str | OnHosts | None
"""By its name; None where a collective has one algorithm only."""


def _each_to_each(n: int, ranks: int) -> Sent:
    return Sent(ranks - 1, n * (ranks - 1) // ranks)


def _ring_all_reduce(n: int, ranks: int) -> Sent:
    found: Sent = ALL_REDUCE["ring"].sent(n, ranks)
    return found


def _tree(n: int, ranks: int) -> Sent:
    # P-1 messages of n bytes in all, shared among P ranks.
    return Sent(ceil((ranks - 1) / ranks), n * (ranks - 1) // ranks)


def _to_or_from_root(n: int, ranks: int) -> Sent:
    # The root's vector of n bytes is cut in P parts, P-1 of which travel.
    return Sent(ceil((ranks - 1) / ranks), n * (ranks - 1) // ranks // ranks)


def _ring_reduce(n: int, ranks: int) -> Sent:
    # Gloo reduces to a root by a ring reduce-scatter and a gather: about n from every rank, as its counters show.
    return Sent(ranks, n)


def _dissemination(n: int, ranks: int) -> Sent:
    return Sent(ceil(log2(ranks)), 0)


def _one_message(n: int, ranks: int) -> Sent:
    return Sent(1, n)


def _nothing(n: int, ranks: int) -> Sent:
    return Sent(0, 0)


FORMULAS: dict[str, Callable[[int, int], Sent]] = {
    "all_reduce": _ring_all_reduce,
    "reduce_scatter": _each_to_each,
    "all_gather": _each_to_each,
    "all_to_all": _each_to_each,
    "broadcast": _tree,
    "reduce": _ring_reduce,
    "gather": _to_or_from_root,
    "scatter": _to_or_from_root,
    "barrier": _dissemination,
    "send": _one_message,
    "recv": _nothing,
}


def even_payload(*, bytes_to_others: int, ranks: int) -> int:
    """The payload of an all-to-all of which a rank sends this much to others, however uneven the parts are."""
    # Rounded up, so that the formula's rounding down gives back the very bytes.
    return -(-bytes_to_others * ranks // (ranks - 1)) if ranks > 1 else 0


@lru_cache(maxsize=4096)
def sent(kind: str, *, payload_bytes: int, ranks: int, algorithm: Algorithm = None) -> Sent:
    """Messages and bytes one rank sends for a collective of this kind; by Gloo's algorithm unless one is named."""
    if ranks == 1 and kind not in ("send", "recv"):
        return Sent(0, 0)
    if kind == "all_reduce" and algorithm is not None:
        name, hosts = (algorithm.name, algorithm.hosts) if isinstance(algorithm, OnHosts) else (algorithm, ())
        found: Sent = ALL_REDUCE[name].sent(payload_bytes, ranks, hosts)
        return found
    if kind == "reduce" and algorithm == "tree":
        return _tree(payload_bytes, ranks)
    return FORMULAS[kind](payload_bytes, ranks)
