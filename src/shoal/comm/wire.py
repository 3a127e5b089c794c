"""What one collective costs on the wire: messages and bytes that a rank sends, as closed formulas.

The ledger enters these figures for every collective it sees and `estimate/traffic.py` predicts with the same
ones, so the algorithm behind each kind is fixed here, once. The kernel's own byte counters are held against
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


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank puts on the wire."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """The all-reduce whose messages depend on who shares a host with whom."""

    hosts: tuple[int, ...]
    """Ranks on each."""


Algorithm = str | Hierarchical | None
"""By its name; None where a collective has one algorithm only."""


def _each_to_each(n: int, ranks: int) -> Sent:
    return Sent(ranks - 1, n * (ranks - 1) // ranks)


def _ring_all_reduce(n: int, ranks: int) -> Sent:
    return Sent(2 * (ranks - 1), 2 * n * (ranks - 1) // ranks)


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


def _both_ways(n: int, ranks: int) -> Sent:
    # A tree up and down: 2(P-1) messages of the whole vector in all.
    return Sent(ceil(2 * (ranks - 1) / ranks), 2 * n * (ranks - 1) // ranks)


def _butterfly(n: int, ranks: int) -> Sent:
    # log2 P exchanges of the whole; each surplus rank hands its vector over and gets the result.
    steps = ranks.bit_length() - 1
    powers = 1 << steps
    messages = steps * powers + 2 * (ranks - powers)
    return Sent(ceil(messages / ranks), n * messages // ranks)


def _rabenseifner(n: int, ranks: int) -> Sent:
    steps = ranks.bit_length() - 1
    powers = 1 << steps
    messages = 2 * steps * powers + 2 * (ranks - powers)
    return Sent(ceil(messages / ranks), 2 * n * (ranks - 1) // ranks)


ALL_REDUCE: dict[str, Callable[[int, int], Sent]] = {
    "ring": _ring_all_reduce,
    "tree": _both_ways,
    "butterfly": _butterfly,
    "rabenseifner": _rabenseifner,
}


def _hierarchical(n: int, hosts: tuple[int, ...]) -> Sent:
    # Rings inside and between, or a tree inside each host and a ring of first ranks. A ring's bytes in either case.
    ranks = sum(hosts)
    if len(set(hosts)) == 1:
        messages = 2 * ranks * (hosts[0] - 1 + len(hosts) - 1)
    else:
        messages = 2 * (ranks - len(hosts)) + 2 * len(hosts) * (len(hosts) - 1)
    return Sent(ceil(messages / ranks), 2 * n * (ranks - 1) // ranks)


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
    if isinstance(algorithm, Hierarchical):
        return _hierarchical(payload_bytes, algorithm.hosts)
    if kind == "all_reduce" and algorithm is not None:
        return ALL_REDUCE[algorithm](payload_bytes, ranks)
    if kind == "reduce" and algorithm == "tree":
        return _tree(payload_bytes, ranks)
    return FORMULAS[kind](payload_bytes, ranks)
