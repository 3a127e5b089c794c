"""PipeDream: a pipeline that is never flushed (Narayanan et al. 2019).

Forward and backward passes take turns as in 1F1B, but each micro-batch updates the weights of a stage as soon as its
backward there is done, and the next one follows at once, also across steps. The backward of a micro-batch uses the
weights of its forward (`stash.py`). With n stages, stage s makes n - 1 - s updates between the two.

The loss and the count of a micro-batch travel back with its gradient, so that every stage divides by the count over
all replicas without waiting for other ranks. What a step reports is summed over all ranks while the pipeline
goes on: its loss is that of the micro-batches which came back to the first stage in it (`micros_reported`).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.engine import Engine
from shoal.parallel.executor import MicroBatches
from shoal.parallel.owner.base import Gradients
from shoal.parallel.pipeline.executor import InFlight, Pipeline
from shoal.parallel.pipeline.stages import StagedModel
from shoal.parallel.pipeline.stash import Version, WeightStash
from shoal.parallel.result import NonFinite, StepResult
from shoal.parallel.runnable import NotRunnable
from shoal.strategy import pp
from shoal.strategy.schedule import Action


def micros_reported(*, ranks: int, micro: int, steps: int) -> int:
    """Of how many micro-batches, from the start, the loss has been reported at the end of `steps` steps.

    Those of the last n - 1 are still on their way back to the first rank, which goes ahead without waiting for them.
    With fewer than n micro-batches in a step it waits for the loss of the step's first.
    """
    return max(steps * micro - ranks + 1, (steps - 1) * micro + 1) if steps else 0


@dataclass(kw_only=True)
class _Underway:
    """A micro-batch between its forward and its backward through this rank's stage."""

    number: int
    key: Any
    flight: InFlight
    version: Version
    updates: int
    """How many this stage had made at its forward."""
    lr_factor: float
    """Of the step that the micro-batch belongs to."""
    numbers: torch.Tensor
    """Sum of its losses and count, of this rank's pipeline; known at the last stage, on its way to the others."""


class PipeDream(Pipeline):
    """Runs the steps of an engine whose stages update after every micro-batch."""

    def __init__(self, engine: Engine, staged: StagedModel, members: Members, term: pp) -> None:
        super().__init__(engine, staged, members, term)
        self.stage = staged.mine[0]
        for name in engine.names:
            if len(staged.holders(name)) > 1:
                among = " and ".join(str(stage) for stage in staged.holders(name))
                raise NotRunnable(
                    f"{term}: stages {among} share {name}, and without a flush they step at different times; use a "
                    "schedule with a flush, such as 1f1b, or fewer stages"
                )
        self.updates_ahead = self.num_stages - 1 - self.stage
        """Updates between the forward and the backward of a micro-batch, once the pipeline is full."""
        self.first_steady_step = max(1, -(-(term.n - 1) // term.micro))
        self.steps_in_flight = 1 + -(-(term.n - 1) // term.micro)
        place, mesh = engine.placement, engine.placement.mesh
        self.update_group: Members = mesh.along(*(name for name, _ in mesh.axes if name != members.axis))
        """The ranks that work on this stage: its replicas, and those that hold other parts of it."""
        parts = {place.tensor.axis, place.experts.axis}
        self.norm = mesh.along(*(name for name, _ in mesh.axes if name in parts))
        """Those of them that hold different parts."""
        self.names = [name for name in engine.names if self.stage in staged.holders(name)]
        self.stash = WeightStash(engine, predict=term.predict)
        self.updates = 0
        self.staleness_seen: Counter[int] = Counter()
        self._begun = 0
        """Micro-batches since the start of training."""
        self._since_drain = 0
        self._underway: deque[_Underway] = deque()
        self._norms: list[float] = []
        """Of the updates since the last exchange."""
        self._exchange: tuple[torch.Tensor, Any] | None = None

    def staleness(self) -> dict[int, int]:
        return dict(sorted(self.staleness_seen.items()))

    def step(self, micro_batches: MicroBatches, *, lr_factor: float) -> StepResult:
        """The forwards of a step's micro-batches, and as many backwards and updates, of earlier ones at first."""
        # The last micro-batch whose loss this step reports, counted from the start of training.
        last = self._begun - 1 + micros_reported(ranks=self.term.n, micro=self.term.micro, steps=1)
        for micro in range(self.term.micro):
            self._begin(micro, micro_batches, lr_factor)
            if len(self._underway) > self.updates_ahead:
                number = self._underway[0].number
                self._finish(self._underway.popleft())
                if number == last:
                    self._begin_exchange()
        if self._exchange is None:
            self._begin_exchange()
        self.stash.attach()
        if self.engine.buffers is not None:
            self.engine.buffers.finish()
        return self._told()

    def settle(self) -> None:
        """The backwards and updates that are still out; then the pipeline is empty, and fills again with the next
        step. A run that is taken up from a checkpoint begins like this too."""
        super().settle()
        if not self._since_drain:
            return
        while self._underway:
            self._finish(self._underway.popleft())
        self.borders.wait_for_sends()
        self.stash.attach()
        self.stash.forget_velocity()
        self._since_drain = 0
        lost = torch.tensor([float(not all(map(isfinite, self._norms)))], dtype=torch.float64).to(self.borders.device)
        self._norms = []
        if self.engine.placement.island.group is not None:
            with BOOK.during("loss"):
                dist.all_reduce(lost, group=self.engine.placement.island.group)
        if float(lost):
            raise NonFinite("the gradient of a micro-batch is no number; the parameters are those before its update")

    def _begin(self, micro: int, micro_batches: MicroBatches, lr_factor: float) -> None:
        """The forward of a micro-batch, with the newest weights or those predicted for its backward."""
        numbers = torch.zeros(2, dtype=torch.float64, device=self.borders.device)

        def loss_and_note(_: int, output: Any) -> tuple[torch.Tensor, Any]:
            value, count = micro_batches.loss(micro, output)
            if self.engine.counts_loss:
                numbers[0] += value.detach()
                numbers[1] += count.detach().reshape(()) if isinstance(count, torch.Tensor) else count
            return value, count

        number = self._begun
        version = self.stash.hold(updates_ahead=min(self._since_drain, self.updates_ahead))
        key = micro_batches.key(micro)
        action = Action("F", self.stage, number)
        flight = self.forward(action, key, lambda _: micro_batches.forward(micro), loss_and_note)
        one = _Underway(
            number=number,
            key=key,
            flight=flight,
            version=version,
            updates=self.updates,
            lr_factor=lr_factor,
            numbers=numbers,
        )
        self._underway.append(one)
        self._begun += 1
        self._since_drain += 1
        self.most_in_flight = max(self.most_in_flight, len(self._underway))

    def _finish(self, one: _Underway) -> None:
        """The backward of a micro-batch with the weights of its forward, and the update of the newest ones."""
        stage, number = self.stage, one.number
        if stage < self.num_stages - 1:
            one.numbers = self.borders.receive_numbers(stage, number, one.numbers.numel())
        if stage > 0:
            with BOOK.during("backward"):
                self.borders.send_numbers(stage, number, one.numbers)
        self.stash.attach(one.version)
        self.backward(Action("BW", stage, number), one.key, one.flight)
        self.stash.release(one.version)
        self._update(one)
        # The stage before has answered to micro-batches that it began after it had these back.
        self.borders.wait_for_sends(up_to=number - 2)

    def _ends_an_update(self, action: Action) -> bool:
        return True

    def _update(self, one: _Underway) -> None:
        engine, reduction = self.engine, self.engine.reduction
        with BOOK.during("backward"):
            loss_sum, count, *used = self._of_this_stage(one.numbers)
            reduction.finish()
        # Every stage finds the same sums, so all of them skip a micro-batch that counts nothing or has no loss. What
        # is lost is found in the step's own sums: all ranks stop at the end of the same step.
        if count and isfinite(loss_sum):
            unused = frozenset(name for name, times in zip(self.names, used, strict=True) if not times)
            with BOOK.during("optimizer"), torch.no_grad():
                norm = engine.scale(count, over=self.norm)
                self._norms.append(norm)
                if isfinite(norm):
                    gradients = Gradients(count, norm, unused)
                    self.stash.update(lambda: engine.owner.update(gradients, lr_factor=one.lr_factor))
                    self.staleness_seen[self.updates - one.updates] += 1
                    self.updates += 1
        reduction.clear()

    def _of_this_stage(self, numbers: torch.Tensor) -> list[float]:
        """Loss, count, and the number of ranks with a gradient for each of the stage's parameters: sums over them."""
        used = torch.tensor([float(name in self.engine.reduction.used) for name in self.names], dtype=torch.float64)
        everything = torch.cat([numbers, used.to(numbers.device)])
        if self.update_group.group is not None:
            with BOOK.during("loss"):
                dist.all_reduce(everything, group=self.update_group.group)
        return [float(value) for value in everything.tolist()]

    def _begin_exchange(self) -> None:
        """Starts the sum over all ranks of what the step reports: loss, count, whether to stop, mean squared norm."""
        squares = sum(norm * norm for norm in self._norms) / max(1, len(self._norms)) / self.update_group.size
        self._norms = []
        squared = torch.tensor([squares], dtype=torch.float64, device=self.borders.device)
        everything = torch.cat([self.engine.take_sums(), squared])
        work = None
        if self.engine.placement.island.group is not None:
            with BOOK.during("loss"):
                work = dist.all_reduce(everything, group=self.engine.placement.island.group, async_op=True)
        self._exchange = everything, work

    def _told(self) -> StepResult:
        assert self._exchange is not None
        everything, work = self._exchange
        self._exchange = None
        if work is not None:
            work.wait()
        loss_sum, count, stop, squares = everything.tolist()
        loss = loss_sum / count if count else float("nan")
        if not isfinite(loss):
            raise NonFinite(f"the loss is {loss} (sum {loss_sum} over {count:g} tokens or samples)")
        if not isfinite(squares):
            raise NonFinite(f"the norm of the gradient is {sqrt(squares) if squares > 0 else squares}")
        return StepResult(loss, count, sqrt(squares), stop > 0)
