"""The engine: a model made ready to train by a strategy, and the two calls a training loop makes.

    engine = parallelize(model, strategy, optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4))
    loss_sum, count = ...                 # the model is called as ever
    engine.backward(loss_sum, count)      # for loss.backward()
    engine.step()                         # for optimizer.step()

Losses are sums with a count. The gradient of the global mean is then the sum of all gradients over the sum of all
counts, exact for any split of any batch; the division is done once, after reduction, together with clipping.

A step is: reduce gradients -> `Owner.update` -> `OuterLevel.after_update` -> `Owner.publish`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.comm.points import reach
from shoal.job.random_optimizer import UpdateDraws
from shoal.layout.cuts import TensorPart
from shoal.parallel.average import WeightAverage
from shoal.parallel.batch_norm import release
from shoal.parallel.bucket import PLAIN, Bucket
from shoal.parallel.buffers import BufferExchange
from shoal.parallel.compression import Compression
from shoal.parallel.consistency import Consistency
from shoal.parallel.cutting import CutModel
from shoal.parallel.data import GradientReduction
from shoal.parallel.flat_slice import Piece
from shoal.parallel.loss_scale import LossScale
from shoal.parallel.noise import GradientNoise, measured
from shoal.parallel.offload.activations import OffloadedActivations
from shoal.parallel.optimizer import SlicedOptimizer
from shoal.parallel.optimizer_needs import closure_for, drawn_slices, sum_over_ranks
from shoal.parallel.owner.base import Gradients, Owner
from shoal.parallel.placement import Placement, Replicas
from shoal.parallel.result import COUNT_WITH_GRADIENT, CountWithGradient, LearnsLater, NonFinite, StepResult
from shoal.parallel.shared_tickets import SharedTickets
from shoal.parallel.sync.outer import OuterLevel


@dataclass
class Engine:
    """A model under a strategy. Made by `parallelize`; `close` gives the model back."""

    model: nn.Module
    placement: Placement
    owner: Owner
    """Whose the parameters and the optimiser state are."""
    clip: float | None
    names: list[str]
    """The trainable parameters of all ranks, in the order in which ranks exchange masks of them."""
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """All parameters of the model as it was built, uncut: shape and type."""
    cut: CutModel
    """What the axes that cut the model have made of it."""
    stop_requested: bool = False
    asked_to_stop: Callable[[], bool] = bool
    """Asked as late in a step as possible: a stop that comes during the step ends the run after this one."""
    compression: Compression | None = None
    """Where a level of dp compresses."""
    buffers: BufferExchange | None = None
    """Where the job declares buffers that replicas update from their own samples."""
    update_draws: UpdateDraws | None = None
    """Where the optimiser draws random numbers."""
    scale_of_loss: LossScale | None = None
    """Where the model computes in fp16."""
    activations: OffloadedActivations | None = None
    """Where activations are offloaded."""
    average: WeightAverage | None = None
    """The moving average of the weights, where one is kept."""
    outer: OuterLevel | None = None
    """What ties this island to others."""
    clock: int = 0
    """Updates since the start of training."""
    consistency: Consistency = field(default_factory=Consistency)
    """How far apart replicas were, where they do not step together."""
    loss_share: float = 1.0
    """The part of its loss that this rank learns from, where several compute the same loss and share its gradient."""
    counts_loss: bool = True
    """Whether this rank's loss enters the sum; of ranks that compute the same loss one counts."""
    last_loss: float = 0.0
    """Of the last step that counted something."""
    norms_by_others: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Batch norms that modules of other kinds synchronised in the last step, as `take_calls_by_others` gives them."""
    _sums: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    _shared: tuple[torch.Tensor, Any] | None = None
    """What all ranks sum at the end of a step's last backward, and the work in flight."""

    def __post_init__(self) -> None:
        self._sums = self._sums.to(self.device)
        held = ((name, param) for name, param in self.model.named_parameters() if name not in self.absent)
        self._frozen = [(name, param) for name, param in held if not param.requires_grad]
        draws = self.update_draws
        if draws is not None:
            self.owner.around_step = lambda: draws.update(drawn_slices(self))

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
    def compressions(self) -> list[Compression]:
        """All that keep what was not sent: of gradients, and of rounds of islands."""
        outer = [] if self.outer is None else [codec.compression for codec in self.outer.codecs]
        remote = self.owner.remote
        pushes = [] if remote is None or remote.codec is None else [remote.codec]
        return [*outer, *pushes, *([] if self.compression is None else [self.compression])]

    @property
    def replicas(self) -> Replicas:
        """The ranks among which plain parameters are replicated."""
        return self.placement.replicas(PLAIN)

    @property
    def reduction(self) -> GradientReduction:
        return self.owner.reduction

    @property
    def buckets(self) -> list[Bucket]:
        return self.owner.buckets

    @property
    def optimizer(self) -> SlicedOptimizer:
        return self.owner.optimizer

    def share(self, samples: int) -> slice:
        """This rank's part of a batch of `samples` samples."""
        everyone = self.placement.split
        size, larger = divmod(samples, everyone.size)
        start = everyone.index * size + min(everyone.index, larger)
        return slice(start, start + size + (everyone.index < larger))

    def backward(self, loss_sum: torch.Tensor, count: torch.Tensor | float, *, last: bool = True) -> None:
        """Gradients of one micro-batch. `last`: the step's other micro-batches are done, reduce now."""
        if self._shared is not None:
            raise RuntimeError(
                "backward() was called again after the step's last micro-batch, whose gradients are reduced already; "
                "call step() first, or pass last=False for every micro-batch but the last"
            )
        self.count(loss_sum, count)
        loss = self.learns_from(loss_sum)
        self.run_backward(loss.backward if loss.requires_grad else lambda: None, last=last)
        if self.reduction.noise is not None:
            self.reduction.noise.close(count)
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
        factor = self.loss_share if self.scale_of_loss is None else self.loss_share * self.scale_of_loss.factor
        return loss_sum if factor == 1.0 else loss_sum * factor

    def run_backward(self, backward: Callable[[], None], *, last: bool, part: int = 0) -> None:
        """One micro-batch's backward through one stage; `last`: this stage's others are done."""
        self.reduction.start(last_micro=last, part=part)
        with self.owner.explaining(), BOOK.during("backward"):
            backward()
            self.reduction.flush()
        self.owner.release(root=not self.pipelined)

    def close_backward(self) -> None:
        """After the step's last backward."""
        for name, param in self._frozen:
            if param.requires_grad:
                raise LearnsLater(
                    f"the parameter {name} requires a gradient now; it did not when the model was built, so no "
                    "optimizer has it and nothing would train it. Let it require one when the model is built, and "
                    "freeze it in forward (requires_grad_(False)) for as long as it should not learn"
                )
        with self.owner.explaining(), BOOK.during("backward"):
            reach("step: backward done")
            self._share()
            self.reduction.finish()
        self.owner.release()

    def _share(self) -> None:
        """One small all-reduce: loss, count, whether to stop, the number of ranks with a gradient by parameter, and two
        numbers for the noise of gradients."""
        used = [float(name in self.reduction.used) for name in self.names]
        # On the parameters' device: a group of accelerators carries nothing else.
        sums, noise = self.take_sums(), self.reduction.noise
        squares = noise.take(sums) if noise is not None else sums.new_zeros(GradientNoise.NUMBERS)
        everything = torch.cat([sums, torch.tensor(used, dtype=torch.float64, device=self.device), squares])
        work = None
        if self.placement.island.group is not None:
            with BOOK.during("loss"):
                work = dist.all_reduce(everything, group=self.placement.island.group, async_op=True)
        self._shared = everything, work

    def take_sums(self) -> torch.Tensor:
        """This rank's loss, count and wish to stop since this was last asked."""
        self._sums[2].fill_(float(self.stop_requested or self.asked_to_stop()))
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def step(self, lr_factor: float = 1.0, *, again: Callable[[], None] | None = None) -> StepResult:
        """Clips, updates, and gathers the parameters again where their stage keeps them so. `again` computes all
        micro-batches of the step once more, for an optimiser that asks for that (LBFGS)."""
        result, gradients = self.reduce()
        closure = closure_for(self, again, result.loss) if self.optimizer.needs_closure else None
        if closure is not None:
            sum_over_ranks(self)
        with BOOK.during("optimizer"), torch.no_grad():
            remote, tickets = self.owner.remote, self.owner.tickets
            if tickets is not None:
                tickets.stop = result.stop
            if not result.skipped:
                self.owner.update(gradients, lr_factor=lr_factor, closure=closure)
            elif isinstance(tickets, SharedTickets):
                tickets.finish()
            if remote is not None:
                result = replace(result, grad_norm=remote.norm)
            reach("step: updated")
            if self.average is not None and not result.skipped:
                self.average.update()
            if self.outer is not None:
                stop = self.outer.after_update(self.clock, count=result.count, stop=result.stop)
                result = replace(result, stop=stop)
            if self.owner.remote is None:
                self.owner.publish()
        self.clock += 1
        reach("step: published")
        self.reduction.clear()
        self.owner.offloading.leave_pages()
        if self.activations is not None:
            self.activations.end_step()
        if self.buffers is not None:
            self.buffers.finish()
        return result

    def reduce(self) -> tuple[StepResult, Gradients]:
        """Ends the reduction that the last backward began: the step's figures; the buckets then hold the mean
        gradients, clipped."""
        if self._shared is None:
            raise RuntimeError("step() was called without backward(); call engine.backward(loss_sum, count) first")
        everything, work = self._shared
        self._shared = None
        self.owner.collect()
        if work is not None:
            with self.owner.explaining():
                work.wait()
        if self.outer is not None and self.outer.term.synchronous(self.clock):
            with torch.no_grad():
                self.outer.sum_gradients(everything, [bucket.reduced() for bucket in self.buckets])
        reach("step: sums received")
        loss_sum, count, stop, *used, spread, parts = everything.tolist()
        # An island learns nothing from a share of which nothing counts; where all ranks step together, none would.
        empty = not (count or loss_sum) and self.outer is not None and not self.outer.term.synchronous(self.clock)
        loss = self.last_loss if empty else loss_sum / count if count else float("nan")
        self.last_loss = loss
        if not isfinite(loss) and self.scale_of_loss is None:
            self.owner.barrier()  # Another replica may still be summing where this one would write next.
            self.reduction.clear()
            raise NonFinite(f"the loss is {loss} (sum {loss_sum} over {count:g} tokens or samples)", self.owner.hint)
        unused = frozenset(name for name, times in zip(self.names, used, strict=True) if not times)
        if self.compression is not None and not empty:
            with BOOK.during("gradient"), torch.no_grad():
                self.compression.reduce(count, unused)
        if self.owner.remote is not None:  # The servers divide and clip.
            return StepResult(loss, count, float("nan"), stop > 0), Gradients(count, float("nan"), unused)
        with BOOK.during("optimizer"), torch.no_grad():
            reach("step: gradients reduced")
            scaled = 1.0 if self.scale_of_loss is None else self.scale_of_loss.factor
            norm = self.scale(1.0 if empty else count * scaled)
            reach("step: norm known")
            if empty:
                return StepResult(loss, 0.0, norm, stop > 0, skipped=True), Gradients(0.0, norm, unused)
            passed = isfinite(norm) if self.scale_of_loss is None else self.scale_of_loss.passed(loss, norm)
            if not passed and (self.scale_of_loss is None or self.scale_of_loss.exhausted):
                self.owner.barrier()  # As above: `scale` has just written into the gradient that others write to next.
                self.reduction.clear()
                raise NonFinite(f"the norm of the gradient is {norm} (the loss is {loss})", self.owner.hint)
        if not passed:
            return StepResult(loss, count, norm, stop > 0, skipped=True), Gradients(count, norm, unused)
        noise = measured(spread / scaled**2, parts, count, norm)
        return StepResult(loss, count, norm, stop > 0, noise), Gradients(count, norm, unused)

    def scale(self, count: float, over: Members | None = None) -> float:
        """Sums become means (`count` includes the loss scale), clipped by the norm over all shards. The norm is
        taken also where nothing is clipped: what is no number must not reach the parameters, nor a checkpoint."""
        over = over or self.placement.norm
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for bucket in self.buckets:
            # Each part of the model counts once, however many of the summing ranks hold it.
            times = self.placement.multiplicity(bucket.family)
            squares += torch.linalg.vector_norm(bucket.reduced()).double() ** 2 / times
        if over.group is not None:
            dist.all_reduce(squares, group=over.group)
        norm = float(squares.sqrt()) / count
        clipping = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        for bucket in self.buckets:
            bucket.reduced().mul_(clipping / count)
        return norm

    @contextmanager
    def consensus(self) -> Iterator[list[torch.Tensor]]:
        """Parameters and buffers are what all islands agree on, to be evaluated or saved; then each island's own
        again. Yields the own ones, empty where islands are equal. All ranks call it alike."""
        if self.owner.remote is not None:
            self.owner.settle()
        if self.outer is None:
            yield []
            return
        with torch.no_grad():
            own = self.outer.agree()
            if own:
                self.owner.publish()
        try:
            yield own
        finally:
            with torch.no_grad():
                if own:
                    self.outer.take_back(own)
                    self.owner.publish()

    def part_of(self, name: str) -> TensorPart | None:
        """Which part of a parameter this rank holds; None if all of it."""
        cut = self.cut.cuts.get(name)
        if cut is None:
            return None
        members = self.placement.cutting(name in self.cut.stacks)
        return TensorPart(cut, members.size, members.index)

    def part_of_piece(self, piece: Piece) -> TensorPart | None:
        """Which part of a parameter a piece is a range of; None if of the full one."""
        return None if piece.full else self.part_of(piece.name)

    def speaks_for(self, name: str, *, of_island: bool = False) -> bool:
        """Whether this rank writes what is not sharded (a buffer, a frozen parameter) to a checkpoint; for its own
        island only, or for all."""
        place = self.placement
        first = (place.samples if of_island else place.split).index == 0 and place.first_of_sample
        return first and (place.tensor.index == 0 or name in self.cut.cuts)

    def close(self) -> None:
        """Takes the hooks off and ends the groups of the mesh; every rank is left with the full parameters. All ranks
        call it alike, with nothing in flight (`Executor.settle`)."""
        reach("close: begun")
        if self.outer is not None:
            self.outer.settle()
            self.outer.close()
        self.reduction.remove()
        self.owner.close()
        self.owner.offloading.close()
        release(self.model)
        self.placement.mesh.close()
