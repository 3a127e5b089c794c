"""The engine: a model made ready to train by a strategy, and the two calls a training loop makes.

    engine = parallelize(model, strategy, optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4))
    loss_sum, count = ...                 # the model is called as ever
    engine.backward(loss_sum, count)      # for loss.backward()
    engine.step()                         # for optimizer.step()

Losses are sums with a count. The gradient of the global mean is then the sum of all gradients over the sum of all
counts, exact for any split of any batch; the division is done once, after reduction, together with clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.group import BOOK
from shoal.parallel.data import Bucket, GradientReduction, Replicas
from shoal.parallel.optimizer import Factory, Piece, SavedState, SlicedOptimizer
from shoal.parallel.zero import ParameterGathering


@dataclass(frozen=True)
class StepResult:
    """What a step was, the same on every rank."""

    loss: float
    """Mean over the global batch."""
    count: float
    grad_norm: float | None
    """Before clipping; None where the job does not clip."""
    stop: bool
    """Whether some rank was asked to stop."""


class NonFinite(ArithmeticError):
    """The loss or the gradient is no longer a number; the parameters are those of the last good step."""


@dataclass
class Engine:
    """A model under a strategy. Made by `parallelize`; `close` takes everything off the model again."""

    model: nn.Module
    replicas: Replicas
    reduction: GradientReduction
    gathering: ParameterGathering | None
    factory: Factory
    options: list[dict[str, Any]]
    elementwise: bool
    clip: float | None
    stop_requested: bool = False
    optimizer: SlicedOptimizer | None = None
    _sums: torch.Tensor | None = None
    _saved: SavedState | None = None
    _masters: list[torch.Tensor] = field(default_factory=list)
    _offsets: list[int] = field(default_factory=list)

    @property
    def buckets(self) -> list[Bucket]:
        return self.reduction.buckets

    def share(self, samples: int) -> slice:
        """This rank's part of a batch of so many samples."""
        everyone = self.replicas.everyone
        size, larger = divmod(samples, everyone.size)
        start = everyone.index * size + min(everyone.index, larger)
        return slice(start, start + size + (everyone.index < larger))

    def backward(self, loss_sum: torch.Tensor, count: torch.Tensor | float, *, last: bool = True) -> None:
        """Gradients of one micro-batch. `last` says that the step's other micro-batches are done: reduce now."""
        if self._sums is None:
            self._sums = torch.zeros(3, dtype=torch.float64)
        self._sums[0] += loss_sum.detach().double().cpu()
        self._sums[1] += float(count)
        self.reduction.start(last_micro=last)
        if self.gathering:
            self.gathering.start()
        self._sums_work = self._share_sums() if last else None
        with BOOK.during("backward"):
            if loss_sum.requires_grad:
                loss_sum.backward()
            self.reduction.finish()
        if self.gathering:
            self.gathering.finish()

    def _share_sums(self) -> Any:
        assert self._sums is not None
        self._sums[2] = float(self.stop_requested)
        if self.replicas.everyone.group is None:
            return None
        with BOOK.during("loss"):
            return dist.all_reduce(self._sums, group=self.replicas.everyone.group, async_op=True)

    def step(self, lr_factor: float = 1.0) -> StepResult:
        """Clips, updates, and makes the parameters whole again where their stage keeps them so."""
        if self._sums is None:
            raise RuntimeError("step() was called without backward(); call engine.backward(loss_sum, count) first")
        if self._sums_work is not None:
            self._sums_work.wait()
        loss_sum, count, stop = self._sums.tolist()
        self._sums = None
        loss = loss_sum / count if count else float("nan")
        if not loss - loss == 0:
            self.reduction.clear()
            raise NonFinite(f"the loss is {loss} (sum {loss_sum} over {count:g} tokens or samples)")
        with BOOK.during("optimizer"), torch.no_grad():
            if self.optimizer is None:
                self._make_optimizer()
            gradients = {id(bucket): bucket.reduced() for bucket in self.buckets}
            norm = self._scale(list(gradients.values()), count)
            if norm is not None and not norm - norm == 0:
                self.reduction.clear()
                raise NonFinite(f"the norm of the gradient is {norm} (the loss is {loss})")
            assert self.optimizer is not None
            self.optimizer.step(gradients=gradients, lr_factor=lr_factor)
            self._publish()
        self.reduction.clear()
        return StepResult(loss, count, norm, stop > 0)

    def _scale(self, gradients: list[torch.Tensor], count: float) -> float | None:
        """Sums become means; means are clipped by the norm over all shards."""
        factor, norm = 1.0 / count, None
        if self.clip is not None:
            squares = torch.stack([torch.linalg.vector_norm(g).double() ** 2 for g in gradients]).sum()
            if self.replicas.zero and self.replicas.sharding.group is not None:
                dist.all_reduce(squares, group=self.replicas.sharding.group)
            norm = float(squares.sqrt()) / count
            factor *= min(1.0, self.clip / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def _publish(self) -> None:
        """Stages 1 and 2: every rank gets the shards that the others updated."""
        if self.replicas.zero in (1, 2) and self.replicas.sharding.group is not None:
            works = []
            for bucket in self.buckets:
                values = bucket.buffer.values
                shard = values[bucket.buffer.shard]
                works.append(dist.all_gather_single(values, shard, group=self.replicas.sharding.group, async_op=True))
            for work in works:
                work.wait()

    def _make_optimizer(self) -> None:
        """At the first step, when it is known which parameters ever get a gradient: the others are left alone,
        as a serial optimiser leaves a parameter without one."""
        names = [slot.name for bucket in self.buckets for slot in bucket.buffer.slots]
        used = torch.tensor([float(name in self.reduction.used) for name in names])
        if self.replicas.everyone.group is not None:
            with BOOK.during("setup"):
                dist.all_reduce(used, group=self.replicas.everyone.group)
        unused = frozenset(name for name, count in zip(names, used.tolist(), strict=True) if not count)
        self.optimizer = SlicedOptimizer(
            self.factory, self.options, self.buckets, self._masters, self._offsets,
            elementwise=self.elementwise, unused=unused,
        )  # fmt: skip
        if self._saved is not None:
            self.optimizer.load(self._saved)
            self._saved = None

    def owned(self, bucket: Bucket) -> tuple[int, int]:
        """The range of a bucket's buffer that this rank writes to a checkpoint: every element is written by one rank."""
        shard, copies = bucket.buffer.shard, self.replicas.copies
        size = -(-(shard.stop - shard.start) // copies.size)
        low = shard.start + copies.index * size
        return min(low, shard.stop), min(low + size, shard.stop)

    def owned_parameters(self) -> Iterator[Piece]:
        for bucket, master, offset in zip(self.buckets, self._masters, self._offsets, strict=True):
            low, high = self.owned(bucket)
            for slot in bucket.buffer.slots:
                start, stop = max(slot.start, low), min(slot.stop, high)
                if start < stop:
                    yield Piece(slot.name, tuple(slot.shape), start - slot.start, master[start - offset : stop - offset])

    def owned_state(self) -> Iterator[tuple[str, Piece]]:
        """Element-wise optimiser state of the same ranges, as (state key, piece)."""
        if self.optimizer is not None:
            yield from self.optimizer.state(self.owned)

    def load_parameters(self, read: Callable[[str, int, int], torch.Tensor]) -> None:
        """Every rank's slice from a checkpoint; `read(parameter, start, stop)` gives elements of it laid out flat."""
        with torch.no_grad():
            for bucket, master, offset in zip(self.buckets, self._masters, self._offsets, strict=True):
                for slot in bucket.buffer.slots:
                    start, stop = max(slot.start, offset), min(slot.stop, offset + master.numel())
                    if start < stop:
                        values = read(slot.name, start - slot.start, stop - slot.start)
                        master[start - offset : stop - offset] = values.to(master.dtype)
            self._publish()

    def load_optimizer(self, saved: SavedState) -> None:
        """Kept until the first step, when the optimiser is made."""
        self._saved = saved

    def close(self) -> None:
        self.reduction.remove()
        if self.gathering:
            self.gathering.remove()
