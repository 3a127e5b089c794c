"""How payloads are exchanged. A reduction asks for an exchange and goes on with the answer, so that those of many
tensors run side by side: what they ask for at the same time travels as one message.

Payloads are summed where they add, gathered where they do not, in equal or unequal sizes, scattered by parts, or sent
along a tree. What is decoded is summed in the order of ranks, so all ranks end with the same bits. (Where payloads add,
the order is the all-reduce's own, which is one for all ranks as well.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.compress.given import Over


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of all ranks' payloads (flat); the own one stays as it is."""

    payload: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gather:
    """All ranks' payloads (flat), in the order of ranks: of one size, or sizes first, then each to each, unpadded."""

    payload: torch.Tensor
    equal: bool = True


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Row i of [ranks, size] goes to rank i; the answer holds what came from each."""

    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class SendTo:
    """To one rank; there is no answer."""

    payload: torch.Tensor
    to: int


@dataclass(frozen=True, slots=True)
class ReceiveFrom:
    """What one rank sends, of the size and type of another tensor."""

    like: torch.Tensor
    source: int


@dataclass(frozen=True, slots=True)
class Spread:
    """The first rank's payload, for all."""

    payload: torch.Tensor


@dataclass(frozen=True, slots=True)
class Agree:
    """Whether what all reductions that run together ask about is true. Nothing is sent: ranks hold the same sums."""

    true: torch.Tensor


Ask = Sum | Gather | AllToAll | SendTo | ReceiveFrom | Spread
Reduction = Generator[Ask | Agree, Any, torch.Tensor]
"""Yields what it asks for, is sent the answers, and returns the reduced tensor."""

Total = Generator[Ask, Any, torch.Tensor]
"""The part of a reduction that a method brings along (`Compressor.total`)."""


def run(
    reductions: Sequence[Reduction], over: Over, answered: Callable[[list[Any], Over], Iterable[Any]] | None = None
) -> list[torch.Tensor]:
    """The results of reductions that run side by side. All ranks give the same ones in the same order. `answered`
    replaces the other ranks, where codecs are timed without them."""
    answer_all = answered or _answered
    totals: dict[int, torch.Tensor] = {}
    agreeing: dict[int, torch.Tensor] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(reductions)))
    while answers:
        asked: dict[int, Ask] = {}
        for at, answer in answers.items():
            try:
                ask = reductions[at].send(answer)
                if isinstance(ask, Agree):
                    agreeing[at] = ask.true
                else:
                    asked[at] = ask
            except StopIteration as end:
                totals[at] = end.value
        joined: dict[Hashable, list[int]] = {}
        for at, ask in asked.items():
            joined.setdefault(_kind(ask), []).append(at)
        answers = {}
        for together in joined.values():
            answers |= zip(together, answer_all([asked[at] for at in together], over), strict=True)
        answers = dict(sorted(answers.items()))
        if not answers and agreeing:
            # When nothing else is left to be done: the host waits for the device once for all of them.
            answers, agreeing = dict.fromkeys(agreeing, bool(torch.stack([*agreeing.values()]).all())), {}
    return [totals[at] for at in range(len(reductions))]


def _kind(ask: Ask) -> Hashable:
    """Asks of one kind can travel together."""
    match ask:
        case Sum(payload) | Spread(payload):
            return type(ask), payload.dtype
        case Gather(payload, equal):
            return Gather, payload.dtype, equal
        case AllToAll(rows):
            return AllToAll, rows.dtype
        case SendTo(payload, to):
            return SendTo, payload.dtype, to
        case ReceiveFrom(like, source):
            return ReceiveFrom, like.dtype, source


def _answered(asks: Sequence[Any], over: Over) -> list[Any]:
    """The answers to asks of one kind."""
    match asks[0]:
        case Sum():
            total = _joined([ask.payload for ask in asks])
            if over.group is not None:
                dist.all_reduce(total, group=over.group)
            return list(total.split([ask.payload.numel() for ask in asks]))
        case Gather(equal=True):
            return _gathered([ask.payload for ask in asks], over)
        case Gather():
            return _gathered_unequal([ask.payload for ask in asks], over)
        case AllToAll():
            rows = torch.cat([ask.rows for ask in asks], dim=1)
            if over.group is not None:
                rows, going = torch.empty_like(rows), rows
                dist.all_to_all_single(rows, going, group=over.group)
            return list(rows.split([ask.rows.size(1) for ask in asks], dim=1))
        case SendTo(to=to):
            dist.send(_joined([ask.payload for ask in asks]), group=over.group, group_dst=to)
            return [None] * len(asks)
        case ReceiveFrom(source=source):
            arrived = _joined([ask.like for ask in asks])
            dist.recv(arrived, group=over.group, group_src=source)
            return list(arrived.split([len(ask.like) for ask in asks]))
    payload = _joined([ask.payload for ask in asks])
    if over.group is not None:
        dist.broadcast(payload, group=over.group, group_src=0)
    return list(payload.split([len(ask.payload) for ask in asks]))


def _joined(payloads: Sequence[torch.Tensor]) -> torch.Tensor:
    """End to end, always in memory of its own."""
    return torch.cat([payload.reshape(-1) for payload in payloads])


def _gathered(payloads: Sequence[torch.Tensor], over: Over) -> list[list[torch.Tensor]]:
    if over.group is None:
        return [[payload] for payload in payloads]
    mine = _joined(payloads)
    everyone = mine.new_empty(over.size, len(mine))
    dist.all_gather_single(everyone, mine, group=over.group)
    return [list(rows.unbind()) for rows in everyone.split([len(payload) for payload in payloads], dim=1)]


def _gathered_unequal(payloads: Sequence[torch.Tensor], over: Over) -> list[list[torch.Tensor]]:
    if over.group is None:
        return [[payload] for payload in payloads]
    own_sizes = torch.tensor([len(payload) for payload in payloads], dtype=torch.int64, device=payloads[0].device)
    sizes = [rank_sizes.tolist() for rank_sizes in _gathered([own_sizes], over)[0]]
    mine = _joined(payloads)
    # What stays here is not sent.
    coming = [0 if rank == over.rank else sum(sizes[rank]) for rank in range(over.size)]
    going = [0 if rank == over.rank else len(mine) for rank in range(over.size)]
    arrived = mine.new_empty(sum(coming))
    if any(map(any, sizes)):
        dist.all_to_all_single(arrived, mine.repeat(over.size - 1), coming, going, group=over.group)
    parts = list(arrived.split(coming))
    parts[over.rank] = mine
    by_rank = [part.split(rank_sizes) for part, rank_sizes in zip(parts, sizes, strict=True)]
    return [[by_rank[rank][at] for rank in range(over.size)] for at in range(len(payloads))]
