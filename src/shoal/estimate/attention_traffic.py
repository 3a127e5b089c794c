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
from dataclasses import dataclass

from shoal.estimate.traffic import Call, Group
from shoal.layout.attention import AttentionCall

SUM_BYTES = 4
"""Gradients are summed around the ring in at least float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One call, as one rank sees it: `length` counts its own positions, heads those before any exchange."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    itemsize: int
    value_dim: int | None = None
    """Head dimension of the values, where it is another."""

    @property
    def queries(self) -> int:
        return self.batch * self.heads * self.length * self.head_dim

    @property
    def keys_and_values(self) -> int:
        return self.batch * self.kv_heads * self.length * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def output(self) -> int:
        return self.batch * self.heads * self.length * (self.value_dim or self.head_dim)


def attention_traffic(
    call: Attention, method: str, members: Group, *, training: bool = True, recomputed: bool = False
) -> list[Call]:
    """The collectives of one call and, in training, of its backward; `method` as the strategy's cp term names it."""
    forms = {"ring": (_ring_forward, _ring_backward), "ulysses": (_ulysses, _ulysses)}
    if method not in forms:
        raise ValueError(f"No such way to attend over a cut sequence: {method!r}; there are {' and '.join(forms)}.")
    forward, backward = forms[method]
    if members.ranks == 1:
        return []
    calls = list(forward(call, members, "forward" if training else "evaluate"))
    if training:
        calls += forward(call, members, "backward") if recomputed else []
        calls += backward(call, members, "backward")
    return calls


def _hops(elements: int, itemsize: int, members: Group, phase: str) -> Iterator[Call]:
    for _ in range(members.ranks - 1):
        yield members.axis, phase, "send", elements * itemsize, members.ranks
        yield members.axis, phase, "recv", elements * itemsize, members.ranks


def _ring_forward(call: Attention, members: Group, phase: str) -> Iterator[Call]:
    yield from _hops(call.keys_and_values, call.itemsize, members, phase)


def _ring_backward(call: Attention, members: Group, phase: str) -> Iterator[Call]:
    yield from _hops(call.keys_and_values, call.itemsize, members, phase)
    yield from _hops(call.keys_and_values, max(call.itemsize, SUM_BYTES), members, phase)


def _ulysses(call: Attention, members: Group, phase: str) -> Iterator[Call]:
    for elements in (call.queries + call.keys_and_values, call.output):
        yield members.axis, phase, "all_to_all", elements * call.itemsize, members.ranks


def attention_calls(calls: Iterable[AttentionCall], method: str, members: Group) -> Iterator[Call]:
    """The collectives of the attention of a step, from the calls that were made in it."""
    forms = {"ring": (_ring_forward, _ring_backward), "ulysses": (_ulysses, _ulysses)}
    forward, backward = forms[method]
    for made in calls:
        call = Attention(
            batch=made.batch, heads=made.heads, kv_heads=made.kv_heads, length=made.length, head_dim=made.head_dim,
            itemsize=made.itemsize, value_dim=made.value_dim,
        )  # fmt: skip
        yield from forward(call, members, "backward" if made.again else "forward")
        if made.trained and not made.again:
            yield from backward(call, members, "backward")
