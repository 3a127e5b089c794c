"""What one call of attention over a cut sequence sends, as formulas; the running code is held to them by tests.

For n ranks, each with b bytes of queries, c of keys, d of values and o of output on its own positions:

    ring      forward   n - 1 hops of c + d
              backward  n - 1 hops of c + d, and n - 1 of their gradients in float32 or wider
    Ulysses   forward   all-to-all of b + c + d, all-to-all of o
              backward  the same two, of gradients

A hop is one send and one receive. Recomputed forwards send theirs a second time, in backward, if what follows in the
block needs attention's output again, as a projection does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal.estimate.traffic import Call, Group
from shoal.layout.attention import AttentionCall

SUM_BYTES = 4
"""Gradients are summed around the ring in at least float32."""


def _hops(elements: int, itemsize: int, members: Group, phase: str) -> Iterator[Call]:
    for _ in range(members.ranks - 1):
        yield members.axis, phase, "send", elements * itemsize, members.ranks
        yield members.axis, phase, "recv", elements * itemsize, members.ranks


def _ring_forward(call: AttentionCall, members: Group, phase: str) -> Iterator[Call]:
    yield from _hops(call.keys_and_values, call.itemsize, members, phase)


def _ring_backward(call: AttentionCall, members: Group, phase: str) -> Iterator[Call]:
    yield from _hops(call.keys_and_values, call.itemsize, members, phase)
    yield from _hops(call.keys_and_values, max(call.itemsize, SUM_BYTES), members, phase)


def _ulysses(call: AttentionCall, members: Group, phase: str) -> Iterator[Call]:
    for elements in (call.queries + call.keys_and_values, call.output):
        yield members.axis, phase, "all_to_all", elements * call.itemsize, members.ranks


FORMS = {"ring": (_ring_forward, _ring_backward), "ulysses": (_ulysses, _ulysses)}
"""By the method that the strategy's cp term names: forward, backward."""


def attention_calls(calls: Iterable[AttentionCall], method: str, members: Group) -> Iterator[Call]:
    """The collectives of calls of attention, and of the backward of those that are trained."""
    forward, backward = FORMS[method]
    for call in calls if members.ranks > 1 else ():
        yield from forward(call, members, "evaluate" if call.evaluating else "backward" if call.again else "forward")
        if call.trained and not call.again and not call.evaluating:
            yield from backward(call, members, "backward")
