"""An owner holds this rank's part of the parameters and of the optimiser state, and makes updates visible to all ranks.

The engine of an island reduces gradients, divides and clips them; then it calls its owner:

    owner.collect()        where gradients are complete only once all replicas call for the step
    owner.update(...)      the optimiser's step on this rank's slices
    owner.publish()        every rank of the island computes with the updated parameters

One file is one kind: `replicated.py`, `sharded.py` (ZeRO 1 and 2), `fully_sharded.py` (ZeRO 3), `shared_memory.py`.
The buckets that an owner makes know how their gradients are reduced; nothing outside asks which kind it is. What an
owner sends is predicted from the strategy alone (`estimate/traffic.py`): the code that runs does not predict itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.comm.points import reach
from shoal.job.on_disk import has_read
from shoal.parallel.bucket import Bucket
from shoal.parallel.cutting import CutModel
from shoal.parallel.data import GradientReduction
from shoal.parallel.flat import FlatBuffer, Memory
from shoal.parallel.flat_slice import Piece, SavedState, pieces_within, unlike_the_rest
from shoal.parallel.full_parameters import FullParameters
from shoal.parallel.offload.level import LowerRange
from shoal.parallel.offload.offloading import Offloading
from shoal.parallel.optimizer import Recipe, SlicedOptimizer
from shoal.parallel.placement import Family, Placement, Replicas
from shoal.parallel.server.remote import RemoteOptimizer
from shoal.parallel.shared_tickets import SharedTickets
from shoal.parallel.zero import ReadsOutside

Entry = tuple[str, nn.Parameter, int]
"""Name, parameter, and which set of optimiser options it has."""
Range = Callable[[Bucket], tuple[int, int]]


@dataclass(frozen=True)
class Gradients:
    """What a step hands to the owner; the mean gradients themselves lie in the buckets (`Bucket.reduced`)."""

    count: float
    """Samples or tokens that they are the mean of."""
    norm: float
    """Over the full model, before clipping."""
    unused: frozenset[str]
    """Parameters that have no gradient on any rank: they are not updated."""


class Owner(ABC):
    """This rank's parameters and optimiser state. All ranks of an island make it alike."""

    keeps_full = True
    """Whether every rank holds the full parameters between steps."""
    private_gradients = True
    """Whether a rank has the gradient of its own samples before it is reduced."""
    hint = ""
    """What may have caused a loss that is no number."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        cut: CutModel,
        recipe: Recipe,
        *,
        bucket_bytes: int,
        offloading: Offloading | None = None,
    ) -> None:
        self.placement, self.cut, self.recipe = placement, cut, recipe
        self.offloading = offloading or Offloading()
        self.places: dict[int, LowerRange] = {}
        """Where masters that are offloaded lie, by the identity of their bucket."""
        self.buckets: list[Bucket] = []
        self._lay_out(model, bucket_bytes)
        self.reduction = GradientReduction(self.buckets, every_micro=cut.staged is None)
        self.full = self._full_parameters()
        self.optimizer = self._optimizer()
        self.around_step: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered around the optimiser's own step (for an optimiser that draws random numbers)."""
        self.remote: RemoteOptimizer | None = None
        """Where servers run the optimiser. `optimizer` then holds state only while a checkpoint is made or read."""
        self.tickets: RemoteOptimizer | SharedTickets | None = None
        """Where replicas take shares of the data as they are free, or as servers let them."""
        self.before_update: list[Callable[[Gradients], None]] = []
        """Called before each update: proofs read the gradients as the optimiser gets them."""

    def _optimizer(self, unfused: frozenset[str] = frozenset()) -> SlicedOptimizer:
        """A new one over this rank's slices."""
        elements = sum(bucket.master.numel() for bucket in self.buckets)
        return SlicedOptimizer(
            self.recipe,
            self.buckets,
            full=self.full,
            unfused=unfused,
            offloaded=self.offloading.state(elements, self.places),
        )

    # Laying parameters out:

    def _full_parameters(self) -> FullParameters | None:
        """Where an optimiser needs full parameters and ranks hold pieces: who updates which."""
        if self.recipe.elementwise:
            return None
        order = {name: place for place, name in enumerate(self.recipe.labels)}
        found = FullParameters(
            self.placement,
            self.cut,
            self.buckets,
            order,
            values_held=self.keeps_full and not self.placement.shared_memory,
        )
        return found if found.classes else None

    def _lay_out(self, model: nn.Module, bucket_bytes: int) -> None:
        params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        # Backward reaches parameters in the reverse of their order, so buckets are filled from the end.
        for group in self._groups(params[::-1], bucket_bytes):
            self._add(group)

    def _add(self, group: list[Entry]) -> Bucket:
        name = group[0][0]
        family = self.cut.family(name)
        replicas = self.placement.replicas(family)
        bucket = self._bucket(group, replicas, family, self.cut.part(name))
        self.buckets.append(bucket)
        return bucket

    @abstractmethod
    def _bucket(self, group: list[Entry], replicas: Replicas, family: Family, part: int) -> Bucket:
        """A bucket of these parameters."""

    def _buffer(self, group: list[Entry], replicas: Replicas, memory: Memory | None = None) -> FlatBuffer:
        shards, index = replicas.sharding.size, replicas.sharding.index
        slices = replicas.route.inside.size if replicas.route is not None else 1
        return FlatBuffer(group, shards=shards, index=index, memory=memory, multiple=slices)

    def _groups(self, params: Sequence[tuple[str, nn.Parameter]], most_bytes: int | None) -> list[list[Entry]]:
        """Consecutive parameters of one kind, up to `most_bytes` together (a larger one stands alone)."""
        open_groups: dict[Any, list[Entry]] = {}
        done: list[list[Entry]] = []
        for name, param in params:
            key = (param.dtype, param.device, self.cut.family(name), self.cut.part(name))
            group = open_groups.setdefault(key, [])
            size = sum(p.numel() * p.element_size() for _, p, _ in group)
            if group and most_bytes is not None and size + param.numel() * param.element_size() > most_bytes:
                done.append(group)
                group = open_groups[key] = []
            group.append((name, param, self.recipe.labels[name]))
        return done + [group for group in open_groups.values() if group]

    # A step:

    @property
    def masters(self) -> list[torch.Tensor]:
        """For each bucket, the values that this rank updates."""
        return [bucket.master for bucket in self.buckets]

    def begin_forward(self, part: int) -> None:  # noqa: B027
        """Before one of several forwards through a stage of this rank whose backwards come later."""

    def release(self, *, root: bool = True) -> None:  # noqa: B027
        """Frees what was gathered for forward and backward; `root` also what all blocks share."""

    def explaining(self) -> AbstractContextManager[None]:
        """Around collectives that fail where ranks have called different parts of the model: names the cause."""
        return nullcontext()

    def collect(self) -> None:  # noqa: B027
        """At the start of the optimiser's step, where gradients of all replicas are complete only then."""

    def update(
        self, gradients: Gradients, *, lr_factor: float, closure: Callable[[], torch.Tensor] | None = None
    ) -> None:
        """The optimiser's step on this rank's slices; parameters without a gradient are skipped. `closure` computes
        loss and gradients again, for an optimiser that asks for that."""
        if self.remote is not None:
            self.remote.update(gradients.count, gradients.unused, lr_factor)
            return
        for observe in self.before_update:
            observe(gradients)
        if self.recipe.elementwise and not gradients.unused <= self.optimizer.unfused:
            self.optimizer.regroup(self.optimizer.unfused | gradients.unused)
        self.optimizer.step(lr_factor=lr_factor, without=gradients.unused, closure=closure, around=self.around_step)

    @abstractmethod
    def publish(self) -> None:
        """After the masters have changed: every rank of the island computes with the new values. Collective."""

    def barrier(self) -> None:  # noqa: B027
        """Waits for the other replicas, where they write to the same memory."""

    def settle(self) -> None:
        """Between steps: nothing of an update is under way, and parameters are current. Collective."""
        if self.remote is not None and self.remote.settle():
            with BOOK.during("optimizer"), torch.no_grad():
                self.publish()

    def serve(self, remote: RemoteOptimizer) -> None:
        """From now on servers run the optimiser; they begin with the parameters of the first replica. Collective."""
        self.remote = self.tickets = remote
        self.reduction.on_reduced = remote.push
        self._load_servers(None, 0)

    def gather_state(self) -> None:
        """Where servers hold the optimiser's state: fetches it, to be saved."""
        saved = self.remote.fetch() if self.remote is not None else None
        if saved is not None:
            self._load_optimizer(saved)

    def resume(self, step: int, saved: SavedState) -> None:
        """After a checkpoint of `step` was loaded: servers get what was. Collective."""
        if self.remote is not None:
            self._load_servers(saved, step)

    def _load_servers(self, saved: SavedState | None, step: int) -> None:
        assert self.remote is not None
        self.remote.load(saved, step)
        if self.placement.world.group is not None:
            with BOOK.during("setup"):  # No replica pushes before the servers hold the model.
                dist.barrier(group=self.placement.world.group)

    def close(self) -> None:
        """Leaves every rank with full parameters of its own. Collective."""
        if self.remote is not None:
            self.remote.close()
        self.optimizer.settle()

    def watch_reads(self) -> ReadsOutside | None:
        """Notes parameters that are read where they are not gathered; None if they always are."""
        return None

    def full_values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter that is trained, and its full values. Collective."""
        for bucket in self.buckets:
            for slot in bucket.buffer.slots:
                yield slot.param, slot.param.detach()

    # To and from checkpoints:

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """The range of a bucket's buffer that this rank writes to a checkpoint: each element is written by one rank of
        the first island."""
        low, high = self.owned_in_island(bucket)
        first = self.placement.islands.index == 0 and (self.remote is None or self.remote.replica == 0)
        return (low, high) if first else (low, low)

    def owned_in_island(self, bucket: Bucket) -> tuple[int, int]:
        """The range that this rank alone writes of its island's values."""
        shard, copies = bucket.buffer.shard, bucket.replicas.copies
        if not self.placement.writes(bucket.family):
            return shard.start, shard.start
        size = -(-(shard.stop - shard.start) // copies.size)
        low = shard.start + copies.index * size
        return min(low, shard.stop), min(low + size, shard.stop)

    def parameters(self) -> Iterator[Piece]:
        """The parameters that this rank writes to a checkpoint."""
        yield from self.pieces_of(self.masters, self.owned)

    def pieces_of(self, masters: Sequence[torch.Tensor], owned: Range) -> Iterator[Piece]:
        """The owned ranges of values that are laid out as the masters are."""
        for bucket, master in zip(self.buckets, masters, strict=True):
            yield from pieces_within(bucket, master, bucket.offset, *owned(bucket))

    def state(self) -> Iterator[tuple[str, Piece]]:
        """Element-wise optimiser state of the same ranges, as (state key, piece)."""
        yield from self.optimizer.state(self.owned)

    def held(self) -> Iterator[Piece]:
        """All parameters that this rank holds, copies of what others write included."""
        for bucket in self.buckets:
            yield from pieces_within(bucket, bucket.buffer.values, 0, 0, bucket.buffer.padded)

    def load_parameters(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        """This rank's slices from a checkpoint; `read(parameter, start, stop)` gives elements of this rank's part of
        it laid out flat. Collective."""
        with torch.no_grad():
            self.release()  # What a forward without backward has left gathered would keep the old values.
            self.barrier()  # Where memory is shared, another rank may still be reading them.
            for piece in self.pieces_of(self.masters, lambda bucket: (0, bucket.buffer.padded)):
                piece.values.copy_(read(piece.name, piece.start, piece.start + piece.values.numel()))
                has_read(piece.values)
            reach("restore: parameters read")
            self.publish()
            reach("restore: parameters published")

    def reset(self) -> None:
        """The optimiser begins anew, with nothing kept of earlier steps."""
        self.optimizer = self._optimizer()

    def load(self, saved: SavedState) -> None:
        """The optimiser's state from a checkpoint."""
        if self.remote is None:
            self._load_optimizer(saved)

    def _load_optimizer(self, saved: SavedState) -> None:
        mine = [slot.name for bucket in self.buckets for slot in bucket.buffer.slots]
        unfused = unlike_the_rest(saved, mine) if self.recipe.elementwise else frozenset()
        self.optimizer = self._optimizer(unfused)
        self.optimizer.load(saved)
