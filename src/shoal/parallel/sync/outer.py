"""An outer level: a level of dp whose replicas are islands, each of which steps synchronously by itself.

The engine of an island calls `after_update` once a step, after its own update and before the updated parameters are
published. What is evaluated and saved is the consensus of all islands: `agree` makes it of the islands' values,
`take_back` gives each island its own again. Under most schemes islands are equal after an exchange; under others the
consensus is their mean, or a centre that the scheme keeps. A scheme (`technique/sync`) sets when islands exchange, and
what; what that sends is predicted by `estimate/outer_calls.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.backend import ShoalGroup
from shoal.comm.ledger import BOOK
from shoal.comm.losses import Losses
from shoal.comm.mesh import Members
from shoal.comm.wire import sent
from shoal.parallel.bucket import Bucket
from shoal.parallel.consistency import Consistency
from shoal.parallel.placement import Placement
from shoal.parallel.result import NOTHING_COUNTED, NonFinite
from shoal.parallel.sync.compressed import CompressedMoves
from shoal.parallel.sync.fragments import Portion
from shoal.parallel.sync.moments import Moments
from shoal.parallel.sync.neighbours import NeighbourMessages
from shoal.parallel.sync.pairs import Pairs
from shoal.parallel.sync.rounds import OuterRound
from shoal.parallel.sync.scheme import Kept, Scheme
from shoal.parallel.sync.streams import PHASE, settle
from shoal.parallel.sync.tickets import IslandTickets

T = TypeVar("T")


def nothing_learned() -> NonFinite:
    """Where islands average, and none has learned from anything since the last time."""
    return NonFinite(f"the loss is nan (sum 0 {NOTHING_COUNTED}")


class OuterLevel:
    """One loose level of dp, as one rank sees it."""

    def __init__(
        self, term: Scheme, placement: Placement, buckets: Sequence[Bucket], model: nn.Module, names: Sequence[str]
    ) -> None:
        self.term = term
        self.placement = placement
        self.buckets = buckets
        self.masters = masters = [bucket.master for bucket in buckets]
        """This rank's slices of the parameters."""
        self.model = model
        self.names = names
        """The trainable parameters of the full model."""
        self.portions: list[Portion] = []
        """What of the slices belongs to each fragment, where a scheme has fragments."""
        self.codecs: list[CompressedMoves] = []
        """The codec of each fragment, where the level compresses."""
        self.flights: dict[int, OuterRound] = {}
        """The rounds of fragments that are on the wire."""
        self.kept = Kept(term, masters)
        """What the scheme keeps, laid out as the masters are."""
        self.count = 0.0
        """Samples or tokens that this island learned from since the last exchange."""
        self.steps = 0
        """Its updates since then."""
        self.losses: Losses | None = None
        """Where an island may be lost while the others go on."""
        self.consistency = Consistency()
        self.apart = 0.0
        """Square of the distance of this island's slices from the mean of all at the last exchange. It is sent with the
        numbers of the next one."""
        self.spread: float | None = None
        """The root mean square of these distances over all islands, relative to the norm of the slices."""
        self.moments: Moments | None = None
        """Of the inner optimiser, where islands average them."""
        self.reset_optimizer: Callable[[], None] = lambda: None
        """The inner optimiser begins anew."""
        self.messages = NeighbourMessages(self)
        """To and from neighbours, where a scheme has them."""
        rule = term.pairs(self.islands.index, self.islands.size)
        self.pairs = None if rule is None else Pairs(self, rule)
        """Exchanges of two islands at a time, where a scheme has them."""
        self.near: NearLevel | None = None
        """The inner one, where two levels are loose."""
        self.goes_on_from: tuple[int, int] | None = None
        """The island of a checkpoint that this one goes on from, as (number, of how many), if that is another one: one
        that comes to a run is a copy of the first."""
        self.tickets = IslandTickets(self) if term.by_tickets else None
        """Where islands run at their own speed."""
        self.on_loss: Callable[[list[int], str], None] = lambda ranks, reason: None
        """Called when islands were lost, with their ranks and the reason."""

    @property
    def islands(self) -> Members:
        """The ranks that hold the same slice of the model in each island."""
        return self.placement.islands

    @property
    def values(self) -> list[torch.Tensor]:
        """What an exchange changes, and an average for the consensus of all islands."""
        return [*self.masters, *self.buffers]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Floating-point buffers of the model, which follow each island's own samples."""
        return [b for b in self.model.buffers() if b.numel() and (b.is_floating_point() or b.is_complex())]

    @property
    def synchronous_bytes(self) -> int:
        """What this rank would send to other islands in a step if their gradients were all-reduced."""
        sizes = [master.numel() * master.element_size() for master in self.masters]
        return sum(sent("all_reduce", payload_bytes=size, ranks=self.islands.size).bytes for size in sizes)

    def after_update(self, clock: int, *, count: float, stop: bool) -> bool:
        """After the island's update of step `clock` (from 0), which learned from `count` samples or tokens. Returns
        whether all islands stop here. `stop`: whether this island was asked to."""
        if self.near is not None:
            self.near.after_update(clock, count=count, stop=False)
        self.count += count
        self.steps += 1
        stopping = self.term.act(self, clock, stop=stop)
        if self.near is not None and not self.steps:
            self.near.go_on()
        if self.tickets is None:
            return stopping
        if self.tickets.paused:
            self.tickets.alone(clock)
            return stopping
        self.tickets.advance(stop=stop)
        return self.tickets.paused and self.tickets.stopping

    def meet(self, stop: bool) -> bool:
        """One exchange of all islands, in which they also agree on whether to stop. Collective over islands."""
        changes = [*self.values, *(tensor for kept in self.kept.values() for tensor in kept)]
        own = [tensor.clone() for tensor in changes] if self.losses is not None else []
        numbers = dict(self.kept.numbers)

        def exchange() -> bool:
            with BOOK.during(PHASE):
                total, stopping = self._sums(stop)
                self.term.exchange(self, self.count / total)
            return stopping

        def undo() -> None:
            for tensor, mine in zip(changes, own, strict=True):
                tensor.copy_(mine)
            self.kept.numbers = dict(numbers)

        stopping = self.together(exchange, undo=undo)
        self.count, self.steps = 0.0, 0
        self.consistency.exchanged(self.spread)
        return stopping

    def meet_neighbours(self, known: int, stop: bool) -> bool:
        """One exchange without a collective: a lost island is missed by its neighbours only, until all islands meet.
        `known`: the round after which all islands know what this one says now."""
        round = int(self.kept.numbers["round"])
        if stop:
            self.messages.stop_after(known)
        with BOOK.during(PHASE):
            self.term.exchange(self, 1 / self.islands.size)
        self.count, self.steps = 0.0, 0
        self.consistency.exchanged(self.spread)
        return self.messages.stops(round)

    def together(self, act: Callable[[], T], *, undo: Callable[[], None] = lambda: None) -> T:
        """Does what all islands take part in. Where one is lost meanwhile, those that are left undo it and do it again
        among themselves. Collective over all ranks."""
        if self.losses is None:
            return act()
        return self.losses.together(act, undo=undo, lose=self._lose, break_off=self._break_off)

    def _break_off(self) -> None:
        for members in (self.islands, self.placement.world):
            if isinstance(members.group, ShoalGroup):
                members.group.break_off()

    def _lose(self, ranks: list[int], reason: str) -> None:
        self.placement.lose(ranks)
        self.messages = NeighbourMessages(self)
        for flight in self.flights.values():
            flight.works = None  # Its group is no more; those that are left send it again.
        if self.pairs is not None:
            self.pairs.close()
        if self.tickets is not None:
            self.tickets.close()
        self.on_loss(ranks, reason)

    def agree(self) -> list[torch.Tensor]:
        """What is evaluated and saved becomes this rank's values; gives back what it had, for `take_back`. Nothing is
        sent where islands are equal. Collective over islands."""
        if self.term.equal and not self.steps:
            return []
        if self.tickets is not None:
            self.tickets.settle()
        own = [tensor.clone() for tensor in self.values]
        try:
            with BOOK.during(PHASE):
                weight = self.count / self._sums(False)[0] if self.term.equal else 1 / self.islands.size
                if self.pairs is not None:
                    self.pairs.meet()
                if self.tickets is not None:
                    self.tickets.finish()
                self.term.agree(self, weight)
                if not self.term.equal:
                    self._measure(own)
        except BaseException:
            self.take_back(own)
            raise
        return own

    def _measure(self, own: Sequence[torch.Tensor]) -> None:
        """How far islands are from what is evaluated, where that is known only when they meet."""
        pairs = list(zip(own, self.masters, strict=False))
        norm = sum(float(torch.linalg.vector_norm(agreed)) ** 2 for _, agreed in pairs)
        apart = self.total(sum(float(torch.linalg.vector_norm(mine - agreed)) ** 2 for mine, agreed in pairs))
        self.spread = (apart / self.islands.size / norm) ** 0.5 if norm else 0.0
        self.consistency.measured(self.spread)

    def take_back(self, own: Sequence[torch.Tensor]) -> None:
        if own:
            for tensor, mine in zip(self.values, own, strict=True):
                tensor.copy_(mine)

    def average(self, weight: float) -> None:
        """Parameters and buffers become their weighted mean over islands."""
        self._average(self.masters, self.buffers, weight)

    def average_parameters(self, weight: float) -> None:
        """Parameters become their weighted mean over islands."""
        self._average(self.masters, [], weight)

    def average_buffers(self, weight: float) -> None:
        """Buffers become their weighted mean over islands."""
        self._average([], self.buffers, weight)

    def _average(self, masters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], weight: float) -> None:
        if self.islands.group is None:
            return
        joined = [self.joined_buffers()] if buffers else []
        own = [flat.clone() for flat in masters]
        works = []
        for flat in (*masters, *joined):
            flat.mul_(weight)
            works.append(dist.all_reduce(flat, group=self.islands.group, async_op=True))
        for work in works:
            work.wait()
        if own:
            self.apart = sum(float(torch.linalg.vector_norm(a.sub_(b))) ** 2 for a, b in zip(own, masters, strict=True))
        if buffers:
            self.put_buffers(joined[0])

    def joined_buffers(self) -> torch.Tensor:
        """All floating-point buffers, end to end, in double precision."""
        wide = torch.complex128 if any(buffer.is_complex() for buffer in self.buffers) else torch.float64
        return torch.cat([buffer.reshape(-1).to(wide) for buffer in self.buffers])

    def put_buffers(self, joined: torch.Tensor) -> None:
        """Gives buffers the values of a tensor that is laid out as `joined_buffers`."""
        buffers = self.buffers
        for buffer, mean in zip(buffers, joined.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_((mean if buffer.is_complex() else mean.real).view(buffer.shape))

    def sum_gradients(self, numbers: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """A step of all islands together: loss, counts and gradients become sums over islands, buffers their mean by
        counts. Collective over islands."""
        group = self.islands.group
        if group is None:
            return
        with BOOK.during(PHASE):
            count = float(numbers[1])
            works = [dist.all_reduce(flat, group=group, async_op=True) for flat in (numbers, *gradients)]
            for work in works:
                work.wait()
            if self.buffers:
                joined = self.joined_buffers().mul_(count / float(numbers[1]))
                dist.all_reduce(joined, group=group)
                self.put_buffers(joined)

    def settle(self) -> None:
        """Waits for what is on the wire. Collective over islands."""
        settle(self)

    def close(self) -> None:
        """Ends what runs in the background, once no island needs it. Collective over islands."""
        if self.pairs is not None or self.tickets is not None:
            with BOOK.during("setup"):
                self.total(0.0)
        if self.pairs is not None:
            self.pairs.close()
        if self.tickets is not None:
            self.tickets.close()

    def total(self, number: float) -> float:
        """The sum of a number over islands. Collective."""
        found: Any = torch.tensor([number], dtype=torch.float64, device=self.device)
        if self.islands.group is not None:
            dist.all_reduce(found, group=self.islands.group)
        return float(found)

    def _sums(self, stop: bool) -> tuple[float, bool]:
        numbers: Any = torch.tensor([self.count, float(stop), self.apart], dtype=torch.float64, device=self.device)
        if self.islands.group is not None:
            dist.all_reduce(numbers, group=self.islands.group)
        total, stopping, apart = numbers.tolist()
        if not total:
            raise nothing_learned()
        self.note_spread(apart, self.masters)
        return total, stopping > 0

    def note_spread(self, apart: float, values: Sequence[torch.Tensor]) -> None:
        """The sum of the squared distances of all islands from their mean has arrived; 0 where there was none yet."""
        norm = sum(float(torch.linalg.vector_norm(value)) ** 2 for value in values) if apart else 0.0
        if norm:
            self.spread = (apart / self.islands.size / norm) ** 0.5

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class NearLevel(OuterLevel):
    """The inner one of two loose levels, whose period divides that of the outer one. Its rounds are among the replicas
    of one group; what all agree on, and when, is the outer level's."""

    @property
    def islands(self) -> Members:
        near = self.placement.near
        assert near is not None
        return near

    def go_on(self) -> None:
        """The outer level has just exchanged: the next round is measured from there."""
        self.count, self.steps = 0.0, 0
        for anchor, value in zip(self.kept["anchor"], self.masters, strict=True):
            anchor.copy_(value)
