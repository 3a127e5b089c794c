"""Ranks arranged by the axes of a strategy, and the group of ranks along each axis.

Axes are written from the slowest links to the fastest, so the leftmost axis varies slowest with the rank. An
axis of size 1 has no group: nothing is sent along it and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch.distributed as dist

from shoal.comm.counted import CountedGroup
from shoal.comm.ledger import BOOK
from shoal.comm.wire import Algorithm


@dataclass(frozen=True)
class Members:
    """The ranks that differ in one axis (or in several axes taken together) only, as seen by one of them."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """The world as a grid. `along(...)` returns the members of one axis, or of several merged into one."""

    def __init__(
        self,
        axes: Sequence[tuple[str, int]],
        *,
        rank: int,
        backend: str | None,
        algorithms: Mapping[str, str] | None = None,
        announce: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`algorithms` names the all-reduce of some axes; a group along several axes uses the first that is named.
        `announce` is called on rank 0 before a group is made: ranks outside of the mesh take part in making it."""
        self._announce = announce if rank == 0 else None
        self.axes = tuple(axes)
        self._algorithms = dict(algorithms or {})
        self.rank = rank
        self.size = prod(size for _, size in axes)
        self._backend = backend
        self._known: dict[tuple[str, ...], Members] = {}
        self._groups: list[dist.ProcessGroup] = []
        """The groups of this rank, in the order in which all ranks created them."""

    def coordinates(self, rank: int) -> dict[str, int]:
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return place

    def algorithm(self, axis: str, kind: str, payload_bytes: int, ranks: int) -> Algorithm:
        """The algorithm of an axis's group for such a collective; None if its backend has only one."""
        for members in self._known.values():
            if members.axis == axis and members.size == ranks and isinstance(members.group, CountedGroup):
                return members.group.algorithm_of(kind, payload_bytes)
        return None

    def along(self, *names: str, label: str | None = None) -> Members:
        """Members along the named axes, ordered as the axes are. Collective: every rank must ask for the same."""
        key = tuple(name for name, _ in self.axes if name in names)
        if key not in self._known:
            self._known[key] = self._make(key, label or "+".join(key) or "none")
        return self._known[key]

    def places_along(self, *names: str) -> Members:
        """The same members without a group: their ranks, and the index of this rank among them."""
        key = tuple(name for name, _ in self.axes if name in names)
        mine = self.coordinates(self.rank)
        ranks = [
            rank
            for rank in range(self.size)
            if all(place == mine[name] for name, place in self.coordinates(rank).items() if name not in key)
        ]
        return Members("+".join(key) or "none", tuple(ranks), ranks.index(self.rank), None)

    def another_along(self, name: str, *, backend: str | None = None) -> Members:
        """A second group of the members along an axis, for messages that must not queue behind those of the first;
        with another backend, if one is named. Collective."""
        return self._make((name,), name, backend)

    def among(self, names: Sequence[str], axis: str, places: Sequence[int]) -> Members:
        """Members along the named axes and at some indices of one more axis. Collective, including ranks at other
        indices of that axis, which get themselves alone."""
        key = (*(name for name, _ in self.axes if name in names), f"{axis}{list(places)}")
        if key not in self._known:
            label = "+".join(key)
            mine = self.coordinates(self.rank)
            found = Members(label, (self.rank,), 0, None)
            groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
            for rank in range(self.size):
                place = self.coordinates(rank)
                if place[axis] in places:
                    fixed = tuple((n, at) for n, at in place.items() if n != axis and n not in names)
                    groups.setdefault(fixed, []).append(rank)
            for ranks in groups.values():
                group = self._group(ranks, label)
                if self.rank in ranks and mine[axis] in places:
                    self._settle(group, label, key)
                    found = Members(label, tuple(ranks), ranks.index(self.rank), group)
            self._known[key] = found
        return self._known[key]

    def without(self, members: Members, lost: Sequence[int]) -> Members:
        """The same members without ranks that were lost, in a group of their own; the old group is given up. Collective
        among those that are left."""
        ranks = [rank for rank in members.ranks if rank not in lost]
        old, new = members.group, None
        if old is not None:
            self._groups.remove(old)
            if isinstance(old, CountedGroup):
                BOOK.forget(old.label)
            dist.destroy_process_group(old)
        if len(ranks) > 1:
            new = dist.new_group(ranks, backend=self._backend, group_desc=members.axis, use_local_synchronization=True)
            self._groups.append(new)
            self._settle(new, members.axis, members.axis.split("+"))
        return Members(members.axis, tuple(ranks), ranks.index(self.rank), new)

    def close(self) -> None:
        """Closes the groups with their links and threads. Collective; nothing may be in flight."""
        while self._groups:
            group = self._groups.pop(0)
            with BOOK.during("setup"):
                dist.barrier(group=group)
            if isinstance(group, CountedGroup):
                BOOK.forget(group.label)
            dist.destroy_process_group(group)

    def _group(self, ranks: Sequence[int], label: str, backend: str | None = None) -> dist.ProcessGroup | None:
        """A group of these ranks; None for a single rank. Collective, including ranks outside it."""
        if len(ranks) == 1:
            return None
        if self._announce is not None:
            self._announce(ranks)
        group = dist.new_group(list(ranks), backend=backend or self._backend, group_desc=label)
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def of_all_ranks(self, label: str) -> dist.ProcessGroup:
        """A group of all ranks of the job, also of those outside of the mesh. Not closed with the mesh. Collective."""
        if self._announce is not None:
            self._announce([])
        group = dist.new_group(backend=self._backend, group_desc=label)
        self._settle(group, label, (label,))
        return group

    def _settle(self, group: dist.ProcessGroup | None, label: str, key: Sequence[str]) -> None:
        if isinstance(group, CountedGroup):
            group.axis = label
            group.prefer(next((self._algorithms[name] for name in key if name in self._algorithms), "auto"))

    def _make(self, key: tuple[str, ...], label: str, backend: str | None = None) -> Members:
        sizes = {name: size for name, size in self.axes}
        fixed = [name for name, _ in self.axes if name not in key]
        mine = self.coordinates(self.rank)
        found: Members | None = None
        rank_at = {tuple(self.coordinates(r).items()): r for r in range(self.size)}
        for rest in product(*(range(sizes[name]) for name in fixed)):
            ranks = []
            for inside in product(*(range(sizes[name]) for name in key)):
                place = {**dict(zip(fixed, rest, strict=True)), **dict(zip(key, inside, strict=True))}
                ranks.append(rank_at[tuple((name, place[name]) for name, _ in reversed(self.axes))])
            group = self._group(ranks, label, backend)
            if all(mine[name] == value for name, value in zip(fixed, rest, strict=True)):
                self._settle(group, label, key)
                found = Members(label, tuple(ranks), ranks.index(self.rank), group)
        assert found is not None
        return found
