"""ZeRO-3: parameters are sharded and gathered only while their block computes.

A block's parameters are gathered before its forward and given back after it, gathered again when the gradient of
its output arrives and given back when its own gradients have been handed to reduction. The next block's gather is
started while the present one computes. The root's parameters (embeddings, head, what blocks share) stay from the
first forward to the end of backward, and so do the last block's, whose backward comes at once, and those of a block
that is used several times in a step or whose output is an opaque object, so that no backward hook can be attached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.comm.backend import ShoalGroup
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.comm.points import reach
from shoal.comm.transfer import OutOfStep
from shoal.parallel.flat import StoredShard
from shoal.parallel.offload.level import MemoryLevel, Moving

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""What a block's output may hold besides tensors, and which surely holds none."""


_ALIKE = "every rank must call the same blocks in the same order, since a block's parameters are gathered from all"
_WAY_OUT = "no update was made. A model that skips or chooses blocks by its data trains with zero=2"


class DifferentBlocks(ValueError):
    """Ranks that share a model's parameters have called different blocks."""


class ShardedUnit:
    """A module and the shards it computes with (one for each dtype)."""

    def __init__(
        self, name: str, module: nn.Module, shards: list[StoredShard], *, is_root: bool, is_last: bool, part: int = 0
    ) -> None:
        self.name = name
        self.module = module
        self.shards = shards
        self.is_root = is_root
        self.is_last = is_last
        self.part = part
        """The pipeline stage on this rank that it belongs to."""
        self.number = 0
        self.works: list[Any] | None = None
        self.undone = len(shards)
        """Buckets of this unit whose gradients are still to come."""
        self.uses = 0
        """Forwards of this micro-batch that backward will come back to."""
        self.called = False
        """Whether this micro-batch has called it."""
        self.held = False
        """Kept gathered from forward to backward, permanently, as soon as it shows that it must be."""

    @property
    def gathered(self) -> bool:
        return all(shard.gathered for shard in self.shards)


class ParameterGathering:
    """Puts the hooks on all units, and takes them off again."""

    def __init__(
        self,
        units: list[ShardedUnit],
        sharding: Members,
        by_host: Members | None = None,
        below: MemoryLevel | None = None,
    ) -> None:
        """`by_host`: on accelerators, a group of the same ranks for messages between their hosts; `below`: where shards
        wait, if not in memory."""
        self.units, self.below = units, below
        self.sharding = sharding
        self.part: int | None = None
        """The pipeline stage on this rank that computes; units of its other stages stay as they are."""
        self.close_partial: Callable[[ShardedUnit], None] = lambda unit: None
        """Reduces a unit's buckets that have some of their gradients."""
        self._order: list[ShardedUnit] = []
        self._hooks: list[Any] = []
        self._tagged = sharding.group if isinstance(sharding.group, ShoalGroup) else None
        self._neighbours = Neighbours(by_host) if by_host is not None and by_host.group is not None else None
        for number, unit in enumerate(units, start=1):
            unit.number = number
            self._hooks.append(unit.module.register_forward_pre_hook(self._before_forward(unit), prepend=True))
            self._hooks.append(unit.module.register_forward_hook(self._after_forward(unit), always_call=False))

    def gather(self, unit: ShardedUnit, phase: str) -> None:
        if not unit.gathered and unit.works is None:
            self._start(unit, phase)
        self._finish(unit)

    def _start(self, unit: ShardedUnit, phase: str) -> None:
        unit.works = []
        self.require_same(unit.number)
        if self._tagged is not None:
            self._tagged.tag = unit.number
        with self.explaining(), BOOK.during(BOOK.phase if BOOK.phase in ("evaluate", "checkpoint") else phase):
            for shard in unit.shards:
                if shard.gathered:
                    continue
                full = shard.allocate()
                if self.sharding.group is not None:
                    unit.works.append(
                        dist.all_gather_single(full, shard.here(), group=self.sharding.group, async_op=True)
                    )
                elif (reading := shard.read_into(full)) is not None:
                    unit.works.append(reading)
                else:
                    full.copy_(shard.shard)
        if self._tagged is not None:
            self._tagged.tag = 0

    def _finish(self, unit: ShardedUnit) -> None:
        if unit.works is not None:
            with self.explaining():
                for work in unit.works:
                    (self.below.wait(work) if isinstance(work, Moving) and self.below is not None else work.wait())
            unit.works = None
            reach("step: parameters gathered")
            for shard in unit.shards:
                shard.use()

    def free(self, unit: ShardedUnit) -> None:
        self._finish(unit)
        for shard in unit.shards:
            if shard.gathered:
                shard.free()

    def _neighbour(self, unit: ShardedUnit, step: int, phase: str) -> None:
        """Starts the gather of the block that comes next in this direction."""
        if unit in self._order:
            at = self._order.index(unit) + step
            if 0 <= at < len(self._order):
                near = self._order[at]
                # A block that is called again is followed, in forward, by one that has had its turn already.
                # Backward does not come to a block that this micro-batch has left out.
                past = bool(near.uses) if step > 0 else not near.called and self.part is None
                if near.part == unit.part and not near.gathered and near.works is None and near.undone and not past:
                    self._start(near, phase)
                # What is offloaded must be in memory before it can be gathered: it is read one block earlier.
                if self.below is not None and self.sharding.group is not None and 0 <= at + step < len(self._order):
                    for shard in self._order[at + step].shards:
                        if self._order[at + step].undone and self._order[at + step].works is None:
                            shard.expect()

    def _before_forward(self, unit: ShardedUnit) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self._elsewhere(unit):
                return
            again = _in_backward()  # A model that recomputes blocks by itself calls them once more.
            self.gather(unit, "backward" if again else "forward")
            if not unit.is_root and not again:
                unit.called |= module.training or torch.is_grad_enabled()
                if unit not in self._order:
                    self._order.append(unit)
                self._neighbour(unit, +1, "forward")

        return hook

    def _after_forward(self, unit: ShardedUnit) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._elsewhere(unit) or _in_backward():
                return  # Recomputed: it stays until its own gradients are there.
            if not torch.is_grad_enabled():
                # The last block stays also for a reentrant checkpoint, whose forward runs without gradients.
                if not unit.uses and not (unit.is_last and module.training):
                    self.free(unit)
                return
            unit.uses += 1
            if unit.is_root:
                return
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    if leaf.requires_grad:
                        leaf.register_hook(self._before_backward(unit))
                elif not isinstance(leaf, PLAIN):
                    unit.held = True
            unit.held = unit.held or unit.uses > 1
            if not unit.is_last and not unit.held:
                self.free(unit)

        return hook

    def _before_backward(self, unit: ShardedUnit) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            # A block that returns its input gets this hook a second time, after its own backward; that is ignored.
            if unit.undone:
                self._close_after(unit)
                self.gather(unit, "backward")
                self._neighbour(unit, -1, "backward")

        return hook

    def _close_after(self, unit: ShardedUnit) -> None:
        """Backward has come to a block: those behind it are done, also where some of their parameters have no gradient
        on this rank (experts without tokens). They are reduced now, as on ranks where all have one: the collectives of
        all ranks then come in one order."""
        if unit in self._order:
            for later in reversed(self._order[self._order.index(unit) + 1 :]):
                if later.part == unit.part and later.undone:
                    self.close_partial(later)

    def bucket_done(self, unit: ShardedUnit) -> Any:
        """For the reduction to call when one of the unit's buckets has all its gradients."""

        def done() -> None:
            unit.undone -= 1
            if unit.undone == 0 and not unit.is_root and not (unit.held and self.part is not None):
                self.free(unit)

        return done

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around what fails when ranks have gathered different blocks: names the cause."""
        try:
            yield
        except OutOfStep as error:
            raise self._different(error.peer, error.theirs, error.mine) from error

    def require_same(self, number: int) -> None:
        """Before a collective among those that shard: all of them must be about to call the same. The shoal backend
        finds that out by the message itself; on others the ranks exchange the unit's number: on accelerators between
        hosts, so that no host waits for its device. Collective."""
        group = self.sharding.group
        if self._neighbours is not None:
            place, theirs = self._neighbours.exchange(number)
            if theirs != number:
                raise self._different(place, max(theirs, 0), max(number, 0))
            return
        if group is None or self._tagged is not None:
            return
        everyone = torch.empty(self.sharding.size, dtype=torch.int64)
        with BOOK.during("agreement"):
            dist.all_gather_single(everyone, torch.tensor([number]), group=group)
        for place, theirs in enumerate(everyone.tolist()):
            if theirs != number:
                raise self._different(place, max(theirs, 0), max(number, 0))

    def _different(self, place: int, theirs: int, mine: int) -> DifferentBlocks:
        names = {unit.number: f"gathers the block '{unit.name}'" for unit in self.units}
        there, here = (names.get(number, "gathers none at this point") for number in (theirs, mine))
        other = self.sharding.ranks[place] if 0 <= place < self.sharding.size else place
        me = self.sharding.ranks[self.sharding.index]
        return DifferentBlocks(f"zero=3: {_ALIKE}, but rank {me} {here} and rank {other} {there}; {_WAY_OUT}")

    def _elsewhere(self, unit: ShardedUnit) -> bool:
        return self.part is not None and not unit.is_root and unit.part != self.part

    def begin_forward(self, part: int) -> None:
        """Before one of several forwards whose backwards come later: each is counted by itself."""
        self.part = part
        for unit in self.units:
            unit.uses = 0

    def finish(self, *, root: bool = True) -> None:
        """After backward: nothing stays gathered, whatever took part; the root may, for the next micro-batch."""
        for unit in self.units:
            if root or not (unit.is_root or unit.held):
                self.free(unit)
                for shard in unit.shards:
                    shard.forget()
            unit.undone, unit.uses, unit.called = len(unit.shards), 0, False

    def remove(self) -> None:
        """Takes the hooks off and leaves every parameter gathered. Collective."""
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            self.gather(unit, "setup")


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class Neighbours:
    """Each rank sends a number to the next rank of a ring and receives one from the rank before it: if two ranks
    differ, so do two neighbours. Two messages a rank, however many there are."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._sent: tuple[Any, torch.Tensor] | None = None

    def exchange(self, number: int) -> tuple[int, int]:
        """(Place of the rank before this one, its number)."""
        ranks, index = self.members.ranks, self.members.index
        before = (index - 1) % len(ranks)
        received = torch.empty(1, dtype=torch.int64)
        with BOOK.during("agreement"):
            if self._sent is not None:
                self._sent[0].wait()
            mine = torch.tensor([number])
            self._sent = dist.isend(mine, dst=ranks[(index + 1) % len(ranks)], group=self.members.group), mine
            dist.recv(received, src=ranks[before], group=self.members.group)
        return before, int(received)


class ReadsOutside(TorchFunctionMode):
    """While active, notes parameters of blocks that are read while the block is not gathered, where they are NaN."""

    def __init__(self, gathering: ParameterGathering) -> None:
        super().__init__()
        self._units = {
            id(slot.param): (slot.name, unit)
            for unit in gathering.units
            for shard in unit.shards
            for slot in shard.buffer.slots
        }
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                name, unit = self._units.get(id(leaf), ("", None))
                if unit is not None and not unit.gathered and name not in self.names:
                    self.names.append(name)
        return result
