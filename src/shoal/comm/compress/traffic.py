"""What a compression sends, as the ledger counts it: the collectives of a reduction, and whether it pays.

The closed forms are those of the methods themselves (`CompressTerm.transfers`). Codecs take their counts and block
sizes from there, and tests hold the bytes that they make, and those that the ledger counts, to these formulas.

No torch here: predictions are made where it is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from shoal.comm.compress.sizes import LARGEST_INDEX
from shoal.comm.wire import sent
from shoal.strategy.terms.compress import CompressTerm, Transfer, none

SMALLEST = 1024
"""Tensors of fewer elements are not compressed: a message costs as much as they do."""
LONG_AFTER = 10**9
"""A step far from the start: what is sent in the long run decides."""


def sent_bytes(
    term: CompressTerm, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
) -> list[Transfer] | None:
    """The collectives of one reduction as rank `rank` makes them; None where data decide."""
    if ranks == 1 or prod(shape) == 0:
        return []
    return term.transfers(shape, itemsize, ranks, step, rank=rank)


def joined(reductions: Iterable[list[Transfer]]) -> list[Transfer]:
    """The collectives of several reductions of one method that run side by side."""
    rounds = zip(*(calls for calls in reductions if calls), strict=True)
    return [Transfer(calls[0].kind, sum(call.payload_bytes for call in calls)) for calls in rounds]


def pays_to_push(term: CompressTerm, shape: Sequence[int], itemsize: int) -> bool:
    """Whether compressing a tensor on its way to a server can pay, as `pays` says it of a reduction."""
    n = prod(shape)
    if isinstance(term, none) or len(shape) < 2 or n < SMALLEST or (term.sends_places and n > LARGEST_INDEX):
        return False
    pushed = term.pushed_bytes(n, itemsize, step=LONG_AFTER)
    return pushed is not None and pushed < n * itemsize


def pays(term: CompressTerm, shape: Sequence[int], itemsize: int, *, ranks: int = 2) -> bool:
    """Whether compressing a tensor can pay at all: not for small ones, not for vectors (norms, biases), and not where a
    rank would send as much as for a dense all-reduce."""
    n = prod(shape)
    if isinstance(term, none) or len(shape) < 2 or n < SMALLEST or (term.sends_places and n > LARGEST_INDEX):
        return False
    calls = sent_bytes(term, shape, itemsize, ranks, step=LONG_AFTER, rank=min(1, ranks - 1))
    if not calls:
        return calls is None
    dense = sent("all_reduce", payload_bytes=n * itemsize, ranks=ranks).bytes
    return sum(sent(call.kind, payload_bytes=call.payload_bytes, ranks=ranks).bytes for call in calls) < dense
