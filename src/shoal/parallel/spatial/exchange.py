"""What ranks that hold parts of a plane send each other: halos, and sums over a plane.

An exchange brings each rank the interval it needs of a tensor; backward returns the gradient of what was borrowed to
its owner, who adds it up. A gathered plane is the case in which everyone needs everything. A sum over all ranks has a
sum over all ranks for its gradient: every rank goes on with its own use of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.layout.spatial.grid import AxisCut, Box, Grid, Move, overlap, size_of
from shoal.parallel.recompute import forward_phase

Messages = Sequence[tuple[int, torch.Tensor]]
"""(rank, tensor)"""
TAG = 7


class PlaneWire(Protocol):
    """How ranks of a grid reach each other."""

    grid: Grid
    index: int

    def swap(self, leaving: Messages, arriving: Messages, phase: str, meanwhile: Callable[[], object]) -> None:
        """Sends tensors to some ranks and fills others with what comes from some; calls `meanwhile` before it waits."""

    def add_up(self, x: torch.Tensor, phase: str) -> None:
        """The sum over all ranks, in place."""

    @property
    def members(self) -> Members: ...


class GroupWire:
    """By a process group."""

    def __init__(self, grid: Grid, members: Members) -> None:
        self.grid, self.members, self.index = grid, members, members.index

    def swap(self, leaving: Messages, arriving: Messages, phase: str, meanwhile: Callable[[], object]) -> None:
        group = self.members.group
        posted = [(peer, dist.P2POp(dist.isend, x, group=group, tag=TAG, group_peer=peer)) for peer, x in leaving]
        posted += [(peer, dist.P2POp(dist.irecv, x, group=group, tag=TAG, group_peer=peer)) for peer, x in arriving]
        # Backends that run one message after the other need neighbours to take turns: with each peer the lower one of
        # two sends first.
        posted.sort(key=lambda row: (row[0], (row[1].op is dist.irecv) == (self.index < row[0])))
        with BOOK.during(phase):
            works = dist.batch_isend_irecv([operation for _, operation in posted]) if posted else []
        meanwhile()
        for work in works:
            work.wait()

    def add_up(self, x: torch.Tensor, phase: str) -> None:
        with BOOK.during(phase):
            dist.all_reduce(x, group=self.members.group)


def moved(x: torch.Tensor, move: Move, wire: PlaneWire, beyond: Beyond | None = None) -> torch.Tensor:
    """This rank's part of a tensor, as an operation needs it. If it travels, with padding around it where `beyond`
    says so: it is laid out anew in any case."""
    if x.dtype == torch.bool and move.travels(wire.grid):
        return moved(x.to(torch.uint8), move, wire).to(torch.bool)
    laid = AxesView.out(x, move, wire)
    wide = laid.expanded(x)
    for axis, need in enumerate(move.needs):
        if need is not None and not need.held:
            low, high = need.intervals[laid.place[axis]]
            wide = wide.narrow(laid.dims[axis], low, high - low)
    if move.travels(wire.grid):
        wide = _PlaneExchange.apply(wide, move, wire, laid, beyond or Beyond())
    else:
        for axis, need in enumerate(move.needs):
            if need is not None and need.held:
                start = need.have(wire.grid, axis)[laid.place[axis]][0]
                low, high = need.intervals[laid.place[axis]]
                wide = wide.narrow(laid.dims[axis], low - start, high - low)
    return laid.merged(wide)


@dataclass(frozen=True, slots=True)
class Beyond:
    """Padding along the two axes, in front and behind, and its value."""

    sizes: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    value: float = 0.0


class AxesView:
    """A tensor viewed so that every dimension that moves is one of its own."""

    def __init__(self, dims: tuple[int, int], sizes: list[list[int]], place: tuple[int, int]) -> None:
        self.dims, self.place = dims, place
        self.sizes = sizes
        """For each dimension of the tensor, those that it is viewed as."""

    @staticmethod
    def out(x: torch.Tensor, move: Move, wire: PlaneWire) -> AxesView:
        place = wire.grid.place(wire.index)
        sizes = [[size] for size in x.shape]
        where: dict[int, tuple[int, int]] = {}
        by_dim: dict[int, list[tuple[int, AxisCut, int]]] = {}
        moving = {need.cut.dim for need in move.needs if need is not None}
        for axis, (need, part) in enumerate(zip(move.needs, move.part, strict=True)):
            if need is not None:
                low, high = need.have(wire.grid, axis)[place[axis]]
                by_dim.setdefault(need.cut.dim, []).append((axis, need.cut, high - low))
            elif part is not None and part.dim in moving:
                low, high = wire.grid.owned(axis, part.length)[place[axis]]
                by_dim.setdefault(part.dim, []).append((axis, part, high - low))
        for dim, rows in by_dim.items():
            # From the left: what lies outside, then each cut dimension and what lies between.
            rows.sort(key=lambda row: -row[1].inner)
            found = [rows[0][1].outer]
            for number, (axis, cut, local) in enumerate(rows):
                where[axis] = (dim, len(found))
                found.append(local)
                inner = rows[number + 1][1] if number + 1 < len(rows) else None
                found.append(cut.inner if inner is None else cut.inner // (inner.length * inner.inner))
            sizes[dim] = found
        starts = [sum(len(each) for each in sizes[:dim]) for dim in range(len(sizes))]
        dims = [starts[where[axis][0]] + where[axis][1] if move.needs[axis] is not None else -1 for axis in (0, 1)]
        return AxesView((dims[0], dims[1]), sizes, place)

    def expanded(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape([size for each in self.sizes for size in each])

    def merged(self, wide: torch.Tensor) -> torch.Tensor:
        shape, at = [], 0
        for each in self.sizes:
            shape.append(prod(wide.shape[at : at + len(each)]))
            at += len(each)
        return wide.reshape(shape)


class _PlaneExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Move, wire: PlaneWire, laid: AxesView, beyond: Beyond) -> torch.Tensor:
        ctx.move, ctx.wire, ctx.laid, ctx.shape, ctx.beyond = move, wire, laid, x.shape, beyond
        have, need = boxes(move, wire.grid, wire.index)
        shape = list(x.shape)
        for axis, dim in enumerate(laid.dims):
            if dim >= 0:
                shape[dim] = need[axis][1] - need[axis][0] + sum(beyond.sizes[axis])
        padded = beyond.sizes != Beyond().sizes
        out = x.new_full(shape, beyond.value) if padded else x.new_empty(shape)
        exchange(x.detach(), inner(out, need, laid, beyond), have, need, move, wire, laid.dims, phase=forward_phase())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        move, wire, laid = ctx.move, ctx.wire, ctx.laid
        have, need = boxes(move, wire.grid, wire.index)
        total = gradient.new_zeros(ctx.shape)
        give_back(inner(gradient, need, laid, ctx.beyond), total, have, need, move, wire, laid.dims)
        return total, None, None, None, None


def inner(x: torch.Tensor, need: Box, laid: AxesView, beyond: Beyond) -> torch.Tensor:
    """What lies inside of the padding."""
    for axis, dim in enumerate(laid.dims):
        if dim >= 0:
            x = x.narrow(dim, beyond.sizes[axis][0], need[axis][1] - need[axis][0])
    return x


def boxes(move: Move, grid: Grid, index: int) -> tuple[Box, Box]:
    """What this rank holds of what travels, and what it needs."""
    place = grid.place(index)
    have, need = [], []
    for axis, each in enumerate(move.needs):
        if each is None:
            have.append((0, 1))
            need.append((0, 1))
            continue
        need.append(each.intervals[place[axis]])
        # What was there in full has been narrowed before.
        have.append(each.have(grid, axis)[place[axis]] if each.held else need[-1])
    return (have[0], have[1]), (need[0], need[1])


def inside(x: torch.Tensor, box: Box, of: Box, dims: tuple[int, int]) -> torch.Tensor:
    """The elements of a box, from a tensor that holds another one."""
    for axis, dim in enumerate(dims):
        if dim >= 0:
            x = x.narrow(dim, box[axis][0] - of[axis][0], box[axis][1] - box[axis][0])
    return x


def exchange(
    x: torch.Tensor,
    out: torch.Tensor,
    have: Box,
    need: Box,
    move: Move,
    wire: PlaneWire,
    dims: tuple[int, int],
    *,
    phase: str,
) -> None:
    leaving, arriving, places = [], [], []
    for peer, goes, comes in move.messages(wire.grid, wire.index):
        if size_of(goes) and x.numel():
            leaving.append((peer, inside(x, goes, have, dims).contiguous()))
        if size_of(comes) and x.numel():
            place = inside(out, comes, need, dims)
            arriving.append((peer, torch.empty_like(place, memory_format=torch.contiguous_format)))
            places.append(place)
    own = common(have, need)

    def keep() -> None:
        if size_of(own):
            inside(out, own, need, dims).copy_(inside(x, own, have, dims))

    wire.swap(leaving, arriving, phase, keep)
    for place, (_, came) in zip(places, arriving, strict=True):
        place.copy_(came)


def give_back(
    gradient: torch.Tensor,
    total: torch.Tensor,
    have: Box,
    need: Box,
    move: Move,
    wire: PlaneWire,
    dims: tuple[int, int],
) -> None:
    leaving, arriving, places = [], [], []
    for peer, goes, comes in move.messages(wire.grid, wire.index):
        if size_of(comes) and total.numel():
            leaving.append((peer, inside(gradient, comes, need, dims).contiguous()))
        if size_of(goes) and total.numel():
            place = inside(total, goes, have, dims)
            arriving.append((peer, torch.empty_like(place, memory_format=torch.contiguous_format)))
            places.append(place)
    own = common(have, need)

    def keep() -> None:
        if size_of(own):
            inside(total, own, have, dims).copy_(inside(gradient, own, need, dims))

    wire.swap(leaving, arriving, "backward", keep)
    for place, (_, came) in zip(places, arriving, strict=True):
        place.add_(came)


def common(a: Box, b: Box) -> Box:
    return overlap(a[0], b[0]), overlap(a[1], b[1])


def summed(x: torch.Tensor, wire: PlaneWire) -> torch.Tensor:
    """The sum over all ranks of their partial sums, for each rank's own use."""
    total: torch.Tensor = _Sum.apply(x, wire)
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: PlaneWire) -> torch.Tensor:
        ctx.wire = wire
        total = x.detach().clone(memory_format=torch.contiguous_format)
        wire.add_up(total, forward_phase())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.wire.add_up(total, "backward")
        return total, None
