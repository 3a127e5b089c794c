"""The engine: a model made ready to train by a strategy, and the two calls a training loop makes.

    engine = parallelize(model, strategy, optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4))
    loss_sum, count = ...                 # the model is called as ever
    engine.backward(loss_sum, count)      # for loss.backward()
    engine.step()                         # for optimizer.step()

Losses are sums with a count. The gradient of the global mean is then the sum of all gradients over the sum of all
counts, exact for any split of any batch; the division is done once, after reduction, together with clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.comm.points import reach
from shoal.job.random_optimizer import ParameterRange, UpdateDraws
from shoal.layout.cuts import TensorPart
from shoal.parallel.batch_norm import release
from shoal.parallel.buffers import BufferExchange
from shoal.parallel.compression import Compression
from shoal.parallel.cutting import CutModel
from shoal.parallel.data import PLAIN, Bucket, GradientReduction
from shoal.parallel.optimizer import Factory, Piece, SavedState, SlicedOptimizer, unlike_the_rest
from shoal.parallel.placement import Placement, Replicas
from shoal.parallel.sync.outer import OuterLevel
from shoal.parallel.zero import ParameterGathering


class CountWithGradient(ValueError):
    """The number by which losses are divided depends on the parameters."""


COUNT_WITH_GRADIENT = (
    "the count requires a gradient: the gradient of sum / count then has a part that comes from the count, which ranks "
    "do not know before backward. Return count.detach() if the weights are constants; otherwise declare "
    'Job(loss_over="batch") and return (sum / count, 1)'
)


@dataclass(frozen=True)
class StepResult:
    """What a step was, the same on every rank."""

    loss: float
    """Mean over the global batch."""
    count: float
    grad_norm: float
    """Before clipping."""
    stop: bool
    """Whether some rank was asked to stop."""


NOTHING_COUNTED = "over 0 tokens or samples)"
"""How the reason of a loss ends that was summed over nothing."""


class NonFinite(ArithmeticError):
    """The loss or the gradient is no longer a number; the parameters are those of the last good step."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what + hint)
        self.what = what
        """The message without the hint."""


@dataclass
class Engine:
    """A model under a strategy. Made by `parallelize`; `close` gives the model back."""

    model: nn.Module
    placement: Placement
    reduction: GradientReduction
    gathering: ParameterGathering | None
    factory: Factory
    options: list[dict[str, Any]]
    elementwise: bool
    clip: float | None
    masters: list[torch.Tensor]
    """For each bucket, the values that this rank updates: the whole buffer at stage 0, its shard otherwise."""
    offsets: list[int]
    """Where in the bucket's buffer they begin."""
    names: list[str]
    """The trainable parameters of all ranks, in the order in which ranks speak of them."""
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """All parameters of the model as it was built, whole: shape and type."""
    cut: CutModel
    """What the axes that cut the model have made of it."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """Which of the options each trainable parameter has."""
    stop_requested: bool = False
    optimizer: SlicedOptimizer = field(init=False)
    compression: Compression | None = None
    """Where a level of dp compresses."""
    buffers: BufferExchange | None = None
    """Where the job declares buffers that replicas update from their own samples."""
    update_draws: UpdateDraws | None = None
    """Where the optimiser draws random numbers."""
    outer: OuterLevel | None = None
    """What ties this island to others."""
    clock: int = 0
    """Updates since the start of training."""
    loss_share: float = 1.0
    """The part of its loss that this rank learns from, where several compute the same loss and share its gradient."""
    counts_loss: bool = True
    """Whether what this rank says of the loss counts; ranks that compute the same loss say it once."""
    norms_by_others: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Batch norms that modules of other kinds synchronised in the last step, as `take_calls_by_others` gives them."""
    _sums: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    _shared: tuple[torch.Tensor, Any] | None = None
    """What all ranks sum at the end of a step's last backward, and the work in flight."""

    def __post_init__(self) -> None:
        self._sums = self._sums.to(self.device)
        self.optimizer = self._optimizer(frozenset())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def pipelined(self) -> bool:
        """Whether several micro-batches are under way at a time."""
        return self.cut.staged is not None

    @property
    def absent(self) -> set[str]:
        """Parameters and buffers that only other ranks hold."""
        return self.cut.absent

    @property
    def replicas(self) -> Replicas:
        """Those among whom plain parameters are replicated."""
        return self.placement.replicas(PLAIN)

    @property
    def buckets(self) -> list[Bucket]:
        return self.reduction.buckets

    def share(self, samples: int) -> slice:
        """This rank's part of a batch of so many samples."""
        everyone = self.placement.split
        size, larger = divmod(samples, everyone.size)
        start = everyone.index * size + min(everyone.index, larger)
        return slice(start, start + size + (everyone.index < larger))

    def backward(self, loss_sum: torch.Tensor, count: torch.Tensor | float, *, last: bool = True) -> None:
        """Gradients of one micro-batch. `last` says that the step's other micro-batches are done: reduce now."""
        if self._shared is not None:
            raise RuntimeError(
                "backward() was called again after the step's last micro-batch, whose gradients are reduced already; "
                "call step() first, or pass last=False for every micro-batch but the last"
            )
        self.count(loss_sum, count)
        loss = self.learns_from(loss_sum)
        self.run_backward(loss.backward if loss.requires_grad else lambda: None, last=last)
        if last:
            self.close_backward()

    def count(self, loss_sum: torch.Tensor, count: torch.Tensor | float) -> None:
        """Adds a micro-batch's loss and count to the step's."""
        if isinstance(count, torch.Tensor) and count.requires_grad:
            raise CountWithGradient(COUNT_WITH_GRADIENT)
        if self.counts_loss:
            # Where the loss lies: the host must not wait for it before backward.
            self._sums[0] += loss_sum.detach().reshape(())
            self._sums[1] += count.detach().reshape(()) if isinstance(count, torch.Tensor) else count

    def learns_from(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """What backward starts from."""
        return loss_sum if self.loss_share == 1.0 else loss_sum * self.loss_share

    def run_backward(self, backward: Callable[[], None], *, last: bool, part: int = 0) -> None:
        """One micro-batch's backward through one stage; `last` says that this stage's others are done."""
        self.reduction.start(last_micro=last, part=part)
        with self._explaining(), BOOK.during("backward"):
            backward()
            self.reduction.flush()
        if self.gathering:
            self.gathering.finish(root=not self.pipelined)

    def close_backward(self) -> None:
        """After the step's last backward."""
        with self._explaining(), BOOK.during("backward"):
            reach("step: backward done")
            self._share()
            self.reduction.finish()
        if self.gathering:
            self.gathering.finish(root=True)

    def _explaining(self) -> AbstractContextManager[None]:
        return self.gathering.explaining() if self.gathering is not None else nullcontext()

    def _share(self) -> None:
        """One small sum over all ranks: loss, count, whether to stop, and who has a gradient for each parameter."""
        used = [float(name in self.reduction.used) for name in self.names]
        # On the parameters' device: a group of accelerators carries nothing else.
        everything = torch.cat([self.take_sums(), torch.tensor(used, dtype=torch.float64, device=self.device)])
        work = None
        if self.placement.island.group is not None:
            with BOOK.during("loss"):
                work = dist.all_reduce(everything, group=self.placement.island.group, async_op=True)
        self._shared = everything, work

    def take_sums(self) -> torch.Tensor:
        """This rank's loss, count and wish to stop since this was last asked."""
        self._sums[2].fill_(float(self.stop_requested))
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def step(self, lr_factor: float = 1.0, *, again: Callable[[], None] | None = None) -> StepResult:
        """Clips, updates, and makes the parameters whole again where their stage keeps them so. `again` computes all
        micro-batches of the step once more, for an optimiser that asks for that (LBFGS)."""
        result, gradients, unused = self._reduced()
        closure = None
        if self.optimizer.needs_closure:
            if again is None:
                raise ValueError(
                    f"{type(self.optimizer.optimizer).__name__} computes the loss several times in a step, and step() "
                    "was not given the function to do so; pass engine.step(again=...), or train a Job"
                )
            closure = self._closure(again, result)
        with BOOK.during("optimizer"), torch.no_grad():
            self.update(gradients, lr_factor, unused, closure)
            reach("step: updated")
            if self.outer is not None:
                stop = self.outer.after_update(self.clock, count=result.count, stop=result.stop)
                result = replace(result, stop=stop)
            self._publish()
        self.clock += 1
        reach("step: published")
        self.reduction.clear()
        if self.buffers is not None:
            self.buffers.finish()
        return result

    def _closure(self, again: Callable[[], None], result: StepResult) -> Callable[[], torch.Tensor]:
        """For the optimiser: loss and gradients at the present parameters. What was just computed serves as long as
        they are the same."""
        before = [master.clone() for master in self.masters]

        def closure() -> torch.Tensor:
            if before and all(map(torch.equal, before, self.masters)):
                before.clear()
                return torch.tensor(result.loss, dtype=torch.float64)
            before.clear()
            self.reduction.clear()
            with torch.enable_grad():
                again()
            fresh, gradients, unused = self._reduced()
            self.optimizer.give(gradients, unused)
            return torch.tensor(fresh.loss, dtype=torch.float64)

        return closure

    def _reduced(self) -> tuple[StepResult, dict[int, torch.Tensor], frozenset[str]]:
        """What the last backward summed: the step's figures, mean gradients after clipping, parameters without one."""
        if self._shared is None:
            raise RuntimeError("step() was called without backward(); call engine.backward(loss_sum, count) first")
        everything, work = self._shared
        self._shared = None
        self.reduction.sum_shared()
        if work is not None:
            with self._explaining():
                work.wait()
        reach("step: sums received")
        loss_sum, count, stop, *used = everything.tolist()
        loss = loss_sum / count if count else float("nan")
        if not isfinite(loss):
            self.meet()  # Another replica may still be summing where this one would write next.
            self.reduction.clear()
            raise NonFinite(f"the loss is {loss} (sum {loss_sum} over {count:g} tokens or samples)", self._hint())
        unused = frozenset(name for name, times in zip(self.names, used, strict=True) if not times)
        if self.compression is not None:
            with BOOK.during("gradient"), torch.no_grad():
                self.compression.reduce(count, unused)
        with BOOK.during("optimizer"), torch.no_grad():
            gradients = {id(bucket): bucket.reduced() for bucket in self.buckets}
            reach("step: gradients reduced")
            norm = self.scale(gradients, count)
            reach("step: norm known")
            if not isfinite(norm):
                self.meet()  # As above: `scale` has just written into the gradient that others write to next.
                self.reduction.clear()
                raise NonFinite(f"the norm of the gradient is {norm} (the loss is {loss})", self._hint())
        return StepResult(loss, count, norm, stop > 0), gradients, unused

    def update(
        self,
        gradients: dict[int, torch.Tensor],
        lr_factor: float,
        unused: frozenset[str],
        closure: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """The optimiser's step on this rank's slices; parameters without a gradient are skipped."""
        if self.elementwise and not unused <= self.optimizer.apart:
            self.optimizer.regroup(self.optimizer.apart | unused)
        self.optimizer.step(
            gradients=gradients, lr_factor=lr_factor, without=unused, closure=closure, around=self._placed
        )

    def _placed(self) -> Any:
        """Around the optimiser's own step: what it draws has a place."""
        return nullcontext() if self.update_draws is None else self.update_draws.update(self._drawn_for())

    def _drawn_for(self) -> Iterator[tuple[torch.Tensor, list[ParameterRange]]]:
        for param, pieces in self.optimizer.contents():
            stretches = []
            for at, piece in pieces:
                part = self.part_of(piece.name)
                whole, held = self.shapes[piece.name][0], None if part is None else part.of
                stretches.append(ParameterRange(piece.name, whole, held, piece.start, piece.values.numel(), at))
            yield param, stretches

    def _optimizer(self, apart: frozenset[str]) -> SlicedOptimizer:
        return SlicedOptimizer(
            self.factory,
            self.options,
            self.buckets,
            self.masters,
            self.offsets,
            elementwise=self.elementwise,
            labels={name: self.labels[name] for name in self.names} if self.labels else None,
            apart=apart,
        )

    def _hint(self) -> str:
        if self.gathering is None:
            return ""
        return (
            "; with zero=3 a block's parameters read as NaN outside the block's own forward: use them there only, or "
            "train with zero=2"
        )

    def scale(self, gradients: dict[int, torch.Tensor], count: float, over: Members | None = None) -> float:
        """Sums become means; means are clipped by the norm over all shards. The norm is taken also where nothing is
        clipped: a gradient that is no number must not reach the parameters, nor a checkpoint."""
        over = over or self.placement.norm
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for bucket in self.buckets:
            # Each part of the model counts once, however many of the summing ranks hold it.
            times = self.placement.multiplicity(bucket.family)
            squares += torch.linalg.vector_norm(gradients[id(bucket)]).double() ** 2 / times
        if over.group is not None:
            dist.all_reduce(squares, group=over.group)
        norm = float(squares.sqrt()) / count
        clipping = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        for gradient in gradients.values():
            gradient.mul_(clipping / count)
        return norm

    def _publish(self) -> None:
        """Stages 1 and 2: every rank gets the shards that the others updated. Stage 3: what is whole is out of date."""
        if self.gathering is not None:
            self.gathering.finish(root=True)
        if self.placement.one_memory:
            self.meet()
        elif self.placement.zero in (1, 2):
            works = []
            for bucket in self.buckets:
                values, sharding = bucket.buffer.values, bucket.replicas.sharding
                if sharding.group is not None:
                    shard = values[bucket.buffer.shard]
                    works.append(dist.all_gather_single(values, shard, group=sharding.group, async_op=True))
            for work in works:
                work.wait()

    @contextmanager
    def consensus(self) -> Iterator[list[torch.Tensor]]:
        """Parameters and buffers are what all islands agree on, to be evaluated or saved; then each island's own
        again. Yields the own ones, empty where islands are equal. All ranks call it alike."""
        if self.outer is None:
            yield []
            return
        with torch.no_grad():
            own = self.outer.agree()
            if own:
                self._publish()
        yield own
        with torch.no_grad():
            if own:
                self.outer.take_back(own)
                self._publish()

    def meet(self) -> None:
        """Waits for the other replicas, where they share memory."""
        if self.buckets and self.buckets[0].memory is not None:
            self.buckets[0].memory.meet()

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """The range of a bucket's buffer that this rank writes to a checkpoint: each element is written by one rank of
        the first island."""
        low, high = self.owned_in_island(bucket)
        return (low, high) if self.placement.islands.index == 0 else (low, low)

    def owned_in_island(self, bucket: Bucket) -> tuple[int, int]:
        """The range that this rank alone writes of its island's values."""
        shard, copies = bucket.buffer.shard, bucket.replicas.copies
        if not self.placement.writes(bucket.family):
            return shard.start, shard.start
        size = -(-(shard.stop - shard.start) // copies.size)
        low = shard.start + copies.index * size
        return min(low, shard.stop), min(low + size, shard.stop)

    def owned_parameters(self) -> Iterator[Piece]:
        yield from self.pieces_of(self.masters, self.owned)

    def pieces_of(
        self, masters: Sequence[torch.Tensor], owned: Callable[[Bucket], tuple[int, int]]
    ) -> Iterator[Piece]:
        """The owned ranges of values that are laid out as the masters are."""
        for bucket, master, offset in zip(self.buckets, masters, self.offsets, strict=True):
            low, high = owned(bucket)
            for slot in bucket.buffer.slots:
                start, stop = max(slot.start, low), min(slot.stop, high)
                if start < stop:
                    values = master[start - offset : stop - offset]
                    yield Piece(slot.name, tuple(slot.shape), start - slot.start, values)

    def owned_state(self) -> Iterator[tuple[str, Piece]]:
        """Element-wise optimiser state of the same ranges, as (state key, piece)."""
        yield from self.optimizer.state(self.owned)

    def part_of(self, name: str) -> TensorPart | None:
        """Which part of a parameter this rank holds; None if all of it."""
        cut = self.cut.cuts.get(name)
        if cut is None:
            return None
        members = self.placement.experts if name in self.cut.stacks else self.placement.tensor
        return TensorPart(cut, members.size, members.index)

    def speaks_for(self, name: str, *, of_island: bool = False) -> bool:
        """Whether this rank writes what is not sharded (a buffer, a frozen parameter) to a checkpoint; for its own
        island only, or for all."""
        place = self.placement
        first = (place.samples if of_island else place.split).index == 0 and place.context.index == 0
        return first and (place.tensor.index == 0 or name in self.cut.cuts)

    def load_parameters(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        """This rank's slices from a checkpoint; `read(parameter, start, stop)` gives elements of this rank's part of
        it laid out flat."""
        with torch.no_grad():
            self.meet()  # Where memory is shared, another rank may still be reading the old values.
            for bucket, master, offset in zip(self.buckets, self.masters, self.offsets, strict=True):
                for slot in bucket.buffer.slots:
                    start, stop = max(slot.start, offset), min(slot.stop, offset + master.numel())
                    if start < stop:
                        values = read(slot.name, start - slot.start, stop - slot.start)
                        master[start - offset : stop - offset] = values.to(master.dtype)
            reach("restore: parameters read")
            self._publish()
            reach("restore: parameters published")

    def load_optimizer(self, saved: SavedState) -> None:
        """The optimiser's state from a checkpoint."""
        mine = [slot.name for bucket in self.buckets for slot in bucket.buffer.slots]
        self.optimizer = self._optimizer(unlike_the_rest(saved, mine) if self.elementwise else frozenset())
        self.optimizer.load(saved)

    def close(self) -> None:
        """Takes the hooks off and ends the groups of the mesh; every rank is left with the whole parameters. All ranks
        call it alike, with nothing in flight (`Executor.settle`)."""
        reach("close: begun")
        self.reduction.remove()
        for bucket in self.buckets:
            if bucket.memory is not None:
                for slot in bucket.buffer.slots:
                    slot.param.data = slot.param.data.clone()  # Its own again.
                bucket.memory.close()
        if self.gathering:
            self.gathering.remove()
        release(self.model)
        self.placement.mesh.close()
