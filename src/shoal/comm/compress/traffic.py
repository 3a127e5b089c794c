"""What a compression sends, in closed form: bytes of a payload, and the collectives that carry it.

Codecs take their counts and block sizes from here, and tests hold the bytes that they make, and those that the ledger
counts, to these formulas. n elements of s bytes each on P ranks; k = max(1, round(r n)) of them where a fraction is
sent; scales are numbers of s bytes:

    fp16        2 ceil(n/P) + 2 a part          all-to-all of P parts, all-gather of P parts
    int8        n + s ceil(n/256)               all-gather
    qsgd(b)     (b + 1) ceil(n/8) + s ceil(n/512)
    ternary     ceil(n/5) + s ceil(n/512)
    onebit      ceil(n/8) + 2s ceil(n/512)
    sign        ceil(n/8) + s ceil(n/512)
    topk, mstopk, hitopk, dgc   k (4 + s)       all-gather (dgc: k falls to its value in the first steps)
    threshold   c (4 + s), c its own count      all-gather of P counts (8 each), all-to-all of what each found
    gtopk       k (4 + s)                       a tree of sends to rank 0, broadcast
    randomk     k s                             all-reduce
    sketch      rows columns s; k s, k = columns / 4      all-reduce of the table, all-reduce of the elements chosen
    powersgd(r) a r s; b r s of an a x b matrix           two all-reduces

No torch here: predictions are made where it is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from shoal.comm.wire import sent
from shoal.strategy.terms.compress import (
    CompressTerm,
    dgc,
    fp16,
    gtopk,
    hitopk,
    int8,
    mstopk,
    none,
    onebit,
    powersgd,
    qsgd,
    randomk,
    sign,
    sketch,
    ternary,
    threshold,
    topk,
)

INDEX_BYTES = 4
LARGEST_INDEX = 2**31 - 1
COUNT_BYTES = 8
HALF_BYTES = 2
INT8_BLOCK = 256
LEVEL_BLOCK = 512
"""Elements that share a scale in QSGD and TernGrad."""
SIGN_BLOCK = 512
TRITS_A_BYTE = 5
SMALLEST = 1024
"""Tensors of fewer elements are not compressed: a message costs as much as they do."""
WARM_UP_RATIO = 0.25
WARM_UP_STEPS = 25
"""DGC sends a quarter, a sixteenth, ... of the elements until it is down to its own fraction, each for so many steps.
The paper changes it every epoch, four times; here an epoch is not known."""

SPARSE = (topk, mstopk, gtopk, hitopk, dgc, threshold)
"""Those that send elements with their places."""


class Transfer(NamedTuple):
    """One collective of a reduction."""

    kind: str
    payload_bytes: int
    """As `wire.py` defines it."""


def divided_up(whole: int, part: int) -> int:
    """Parts needed for the whole, the last of which may be short."""
    return -(-whole // part)


def kept_count(fraction: float, num_elements: int) -> int:
    """How many elements a fraction is: at least one."""
    return max(1, min(num_elements, round(fraction * num_elements)))


def warm_up_fraction(fraction: float, step: int) -> float:
    """DGC's share of elements at a step."""
    return max(fraction, WARM_UP_RATIO ** (1 + min(step // WARM_UP_STEPS, 100)))


def sketch_count(columns: int, num_elements: int) -> int:
    """How many elements are read back from a sketch."""
    return max(1, min(num_elements, columns // 4))


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor taken as a matrix: its first dimension, and all others."""
    rows = shape[0] if len(shape) else 1
    return rows, prod(shape[1:])


def effective_rank(rank: int, shape: Sequence[int]) -> int:
    """A product of two matrices never has a higher rank than fits."""
    return min(rank, *matrix_of(shape))


def sparse_bytes(count: int, itemsize: int) -> int:
    """Elements with their places."""
    return count * (INDEX_BYTES + itemsize)


def payload_bytes(term: CompressTerm, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
    """What one rank makes of a tensor for an all-gather; None where the data decide, or where nothing is gathered."""
    n = num_elements
    if isinstance(term, int8):
        return n + itemsize * divided_up(n, INT8_BLOCK)
    if isinstance(term, qsgd):
        return (term.bits + 1) * divided_up(n, 8) + itemsize * divided_up(n, LEVEL_BLOCK)
    if isinstance(term, ternary):
        return divided_up(n, TRITS_A_BYTE) + itemsize * divided_up(n, LEVEL_BLOCK)
    if isinstance(term, onebit):
        return divided_up(n, 8) + 2 * itemsize * divided_up(n, SIGN_BLOCK)
    if isinstance(term, sign):
        return divided_up(n, 8) + itemsize * divided_up(n, SIGN_BLOCK)
    if isinstance(term, dgc):
        return sparse_bytes(kept_count(warm_up_fraction(term.r, step), n), itemsize)
    if isinstance(term, (topk, mstopk, gtopk, hitopk)):
        return sparse_bytes(kept_count(term.r, n), itemsize)
    return None


def sent_bytes(
    term: CompressTerm, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
) -> list[Transfer] | None:
    """The collectives of one reduction as rank `rank` makes them; None where data decide."""
    n = prod(shape)
    if ranks == 1 or n == 0:
        return []
    if isinstance(term, threshold):
        return None
    if isinstance(term, none):
        return [Transfer("all_reduce", n * itemsize)]
    if isinstance(term, fp16):
        parts = ranks * HALF_BYTES * (divided_up(n, ranks) + 1)
        return [Transfer("all_to_all", parts), Transfer("all_gather", parts)]
    if isinstance(term, randomk):
        return [Transfer("all_reduce", kept_count(term.r, n) * itemsize)]
    if isinstance(term, sketch):
        table, chosen = term.rows * term.columns, sketch_count(term.columns, n)
        return [Transfer("all_reduce", table * itemsize), Transfer("all_reduce", chosen * itemsize)]
    if isinstance(term, powersgd):
        width = effective_rank(term.rank, shape)
        return [Transfer("all_reduce", size * width * itemsize) for size in matrix_of(shape)]
    payload = payload_bytes(term, n, itemsize, step=step)
    assert payload is not None, f"{term} has no formula"
    if isinstance(term, gtopk):
        return _tree(payload, ranks, rank)
    return [Transfer("all_gather", ranks * payload)]


def joined(reductions: Iterable[list[Transfer]]) -> list[Transfer]:
    """The collectives of several reductions of one method that run side by side."""
    rounds = zip(*(calls for calls in reductions if calls), strict=True)
    return [Transfer(calls[0].kind, sum(call.payload_bytes for call in calls)) for calls in rounds]


def _tree(payload: int, ranks: int, rank: int) -> list[Transfer]:
    calls, distance = [], 1
    while distance < ranks:
        if rank % (2 * distance) == distance:
            calls.append(Transfer("send", payload))
            break
        if rank + distance < ranks:
            calls.append(Transfer("recv", payload))
        distance *= 2
    return [*calls, Transfer("broadcast", payload)]


def pays(term: CompressTerm, shape: Sequence[int], itemsize: int, *, ranks: int = 2) -> bool:
    """Whether compressing a tensor can pay at all: not for small ones, not for vectors (norms, biases), and not where a
    rank would send as much as for a dense all-reduce."""
    n = prod(shape)
    if isinstance(term, none) or len(shape) < 2 or n < SMALLEST or (isinstance(term, SPARSE) and n > LARGEST_INDEX):
        return False
    # A step far from the start: what is sent in the long run decides.
    calls = sent_bytes(term, shape, itemsize, ranks, step=10**9, rank=min(1, ranks - 1))
    if not calls:
        return calls is None
    dense = sent("all_reduce", payload_bytes=n * itemsize, ranks=ranks).bytes
    return sum(sent(call.kind, payload_bytes=call.payload_bytes, ranks=ranks).bytes for call in calls) < dense
