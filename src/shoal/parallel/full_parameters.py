"""Full parameters for an optimiser that looks at one at a time (LARS, LAMB, Muon, Shampoo), where ranks hold pieces.

Under ZeRO and tensor parallelism a parameter lies in pieces on several ranks. One of them owns it: before a step the
others send it their pieces of the gradient (and of the values, unless every rank has all of them, as in stages 1 and
2), it updates the parameter, and sends the pieces back. Owners are balanced by bytes, so that the work of a step is
shared as well: of n ranks each updates about 1/n of the model, and holds the state of that part.

For a parameter of n bytes and pieces of p bytes, a rank that does not own it sends p (2p with values) and the owner
sends n - p. All parameters of the same ranks and type travel in one all-to-all each way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.common.numbers import balanced
from shoal.job.probe_layouts import attributes_of
from shoal.layout.cuts import Cut, TensorPart
from shoal.parallel.bucket import Bucket
from shoal.parallel.cutting import CutModel
from shoal.parallel.flat import Slot
from shoal.parallel.flat_slice import OwnedSlice
from shoal.parallel.placement import Placement


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank holds of a parameter: elements [start, stop) of its part laid out flat."""

    start: int
    stop: int
    index: int
    """Its place among the ranks that cut the parameter."""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Spread:
    """A parameter that lies in pieces on several ranks."""

    bucket: Bucket
    slot: Slot
    cut: Cut | None
    ranks: int
    """Ranks that cut it."""
    index: int
    """This rank's place among them."""
    shape: tuple[int, ...]
    """Of the full parameter."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def range(self) -> tuple[int, int]:
        """What of this rank's part is in its shard."""
        shard, slot = self.bucket.buffer.shard, self.slot
        start = min(max(slot.start, shard.start), slot.stop)
        return start - slot.start, max(start, min(slot.stop, shard.stop)) - slot.start

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's piece, of values laid out as the master is."""
        start, stop = (self.slot.start - self.bucket.offset + place for place in self.range)
        return flat[start:stop] if start < stop else flat[:0]

    def join(self, shares: Sequence[_Share], pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor of everyone's pieces."""
        full = pieces[0].new_empty(self.shape)
        if self.cut is None:
            for share, piece in zip(shares, pieces, strict=True):
                full.view(-1)[share.start : share.stop] = piece
            return full
        for index in range(self.ranks):
            part = TensorPart(self.cut, self.ranks, index)
            local = full.new_empty(part.local_shape(self.shape))
            for share, piece in zip(shares, pieces, strict=True):
                if share.index == index:
                    local.view(-1)[share.start : share.stop] = piece
            part.fill(full, local)
        return full

    def split(self, full: torch.Tensor, shares: Sequence[_Share]) -> Iterator[torch.Tensor]:
        """Everyone's piece of the full tensor."""
        parts: dict[int, torch.Tensor] = {}
        for share in shares:
            if share.index not in parts:
                whole = full if self.cut is None else self.cut.part(full, self.ranks, share.index)
                parts[share.index] = whole.reshape(-1)
            yield parts[share.index][share.start : share.stop]


@dataclass
class _Class:
    """Parameters of one type that lie on the same ranks."""

    members: Members
    values: bool
    """Whether values are sent too: no rank has all of them."""
    params: list[_Spread] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    shares: list[list[_Share]] = field(default_factory=list)
    """For each parameter, those of all members."""

    def owned_by(self, member: int) -> list[int]:
        return [place for place, owner in enumerate(self.owners) if owner == member]

    @property
    def mine(self) -> list[int]:
        return self.owned_by(self.members.index)

    def agree(self) -> None:
        """Who owns what follows from the sizes; who holds what, ranks report, since buffers of uneven parts differ."""
        self.owners = balanced([spread.numel for spread in self.params], self.members.size)
        with BOOK.during("setup"):
            rows = exchange({"shares": [[*spread.range, spread.index] for spread in self.params]}, self.members)
        self.shares = [[_Share(*row["shares"][place]) for row in rows] for place in range(len(self.params))]

    def collect(self, owned: Mapping[str, OwnedSlice]) -> None:
        reduced = {id(spread.bucket): spread.bucket.reduced() for spread in self.params}
        times, sizes, going = 1 + self.values, self._sizes(), []
        for member in range(self.members.size):
            theirs = [self.params[place] for place in self.owned_by(member)]
            going += [spread.mine(reduced[id(spread.bucket)]) for spread in theirs]
            going += [spread.mine(spread.bucket.master) for spread in theirs] if self.values else []
        sent = [times * size for size in sizes]
        received = [times * sum(self.shares[place][member].size for place in self.mine) for member in self._members]
        coming = self._move(going, sent, received)
        pieces: list[list[torch.Tensor]] = [[] for _ in range(times * len(self.mine))]
        for member, of_member in zip(self._members, coming.split(received), strict=True):
            lengths = times * [self.shares[place][member].size for place in self.mine]
            for place, piece in enumerate(of_member.split(lengths) if lengths else ()):
                pieces[place].append(piece)
        for number, place in enumerate(self.mine):
            spread, shares = self.params[place], self.shares[place]
            param = owned[spread.slot.name].param
            param.grad = spread.join(shares, pieces[number])
            if self.values:
                param.data.copy_(spread.join(shares, pieces[len(self.mine) + number]))

    def send_back(self, owned: Mapping[str, OwnedSlice]) -> None:
        by_owner: list[list[torch.Tensor]] = [[] for _ in self._members]
        for place in self.mine:
            spread, shares = self.params[place], self.shares[place]
            for member, piece in enumerate(spread.split(owned[spread.slot.name].param.detach(), shares)):
                by_owner[member].append(piece)
        sent = [sum(piece.numel() for piece in pieces) for pieces in by_owner]
        received = self._sizes()
        coming = self._move([piece for pieces in by_owner for piece in pieces], sent, received)
        for member, from_owner in zip(self._members, coming.split(received), strict=True):
            spreads = [self.params[place] for place in self.owned_by(member)]
            lengths = [spread.range[1] - spread.range[0] for spread in spreads]
            for spread, piece in zip(spreads, from_owner.split(lengths) if lengths else (), strict=True):
                spread.mine(spread.bucket.master).copy_(piece)

    @property
    def _members(self) -> range:
        return range(self.members.size)

    def _sizes(self) -> list[int]:
        """Elements of this rank's pieces, by their owner."""
        mine = [spread.range[1] - spread.range[0] for spread in self.params]
        return [sum(mine[place] for place in self.owned_by(member)) for member in self._members]

    def _move(self, pieces: Sequence[torch.Tensor], sent: list[int], received: list[int]) -> torch.Tensor:
        empty = self.params[0].bucket.master[:0]
        going = torch.cat([empty, *pieces])
        coming = going.new_empty(sum(received))
        dist.all_to_all_single(coming, going, received, sent, group=self.members.group)
        return coming


class FullParameters:
    """The parameters that this rank updates for others, and the exchange before and after an update. Collective."""

    def __init__(
        self,
        placement: Placement,
        cut: CutModel,
        buckets: Sequence[Bucket],
        order: Mapping[str, int],
        *,
        values_held: bool,
    ) -> None:
        """`order` has the names of all parameters; `values_held`: every rank has the full values of uncut ones."""
        for across in (None, placement.tensor, placement.experts):
            placement.pieces(across)  # All ranks make the same groups, whichever parameters they hold.
        found: dict[tuple[str, torch.dtype], _Class] = {}
        slots = [(bucket, slot) for bucket in buckets for slot in bucket.buffer.slots if slot.shape.numel()]
        for bucket, slot in sorted(slots, key=lambda row: order[row[1].name]):
            how = cut.cuts.get(slot.name)
            across = placement.cutting(slot.name in cut.stacks) if how is not None else None
            members = placement.pieces(across)
            if members.size == 1:
                continue
            shape = tuple(slot.shape)
            if how is not None:
                shape = (*shape[: how.dim], how.size, *shape[how.dim + 1 :])
            size, index = (1, 0) if across is None else (across.size, across.index)
            spread = _Spread(bucket, slot, how, size, index, shape)
            key = (members.axis, bucket.buffer.dtype)
            if key not in found:
                found[key] = _Class(members, values=how is not None or not values_held)
            found[key].params.append(spread)
        self.classes = list(found.values())
        for each in self.classes:
            each.agree()
        self.names = frozenset(spread.slot.name for each in self.classes for spread in each.params)
        """All parameters that some rank updates for others."""
        self.owned: dict[str, OwnedSlice] = {}
        """Those that this rank updates."""
        for each in self.classes:
            for spread in (each.params[place] for place in each.mine):
                values = torch.zeros(spread.shape, dtype=spread.bucket.buffer.dtype, device=spread.bucket.buffer.device)
                param = nn.Parameter(values if each.values else spread.slot.param.detach())
                vars(param).update(attributes_of(spread.slot.param))
                self.owned[spread.slot.name] = OwnedSlice(spread.bucket, param, spread.slot)

    def collect(self) -> None:
        """Gives every owner the gradients of its parameters, and their values."""
        for each in self.classes:
            each.collect(self.owned)

    def send_back(self) -> None:
        """Gives every rank its pieces of the updated parameters."""
        for each in self.classes:
            each.send_back(self.owned)
