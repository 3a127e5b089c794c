"""Pipeline parallelism: this rank's stages, run in the order of a schedule.

Activations go to the next stage's rank as soon as they are there, gradients to the one before; a rank waits only for
what its next action needs. Gradients of parameters are accumulated over the micro-batches and reduced once, with the
last backward of their stage. Without a flush there is no such last one: that is `pipedream.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.comm.points import reach
from shoal.parallel.engine import Engine
from shoal.parallel.executor import Executor, MicroBatches
from shoal.parallel.pipeline.arrival import Arrival
from shoal.parallel.pipeline.borders import Borders, Message
from shoal.parallel.pipeline.deferred import DeferredWeights
from shoal.parallel.pipeline.stages import StagedModel
from shoal.parallel.result import StepResult
from shoal.parallel.runnable import NotRunnable
from shoal.strategy import pp
from shoal.strategy.schedule import Action, actions, last_backward, stage_rank


@dataclass
class InFlight:
    """A micro-batch between its forward and its backward through one stage."""

    received: list[Arrival]
    sent: list[torch.Tensor]
    loss: torch.Tensor | None


class Pipeline(Executor):
    """Runs the steps of an engine whose model is in stages."""

    def __init__(self, engine: Engine, staged: StagedModel, members: Members, term: pp) -> None:
        super().__init__(engine)
        self.staged, self.members, self.term = staged, members, term
        self.num_stages = term.n * term.chunks
        self.holds_loss = self.num_stages - 1 in staged.mine
        self.actions: list[Action] = actions(term)[members.index]
        self.parts = {stage: part for part, stage in enumerate(staged.mine)}
        self.lasts = {last_backward(self.actions, stage) for stage in staged.mine}
        mesh, device = engine.placement.mesh, engine.device
        self.borders = Borders(
            members,
            lambda stage: stage_rank(stage, term.n, term.chunks, term.schedule),
            num_stages=self.num_stages,
            tags=max(term.micro, 2 * term.n),
            device=device,
            # In host memory every backend heeds tags, and one group carries all messages.
            another=None if device.type == "cpu" else lambda: mesh.another_along(members.axis),
        )
        self.deferred = DeferredWeights(engine.reduction) if term.schedule == "zero-bubble" else None
        self.most_in_flight = 0
        self._received = _received_by_then(term, members.index)
        self._due = {(kind, members.ranks[at]): sent for (kind, at), sent in _sent_to(term, members.index).items()}

    def step(self, micro_batches: MicroBatches, *, lr_factor: float) -> StepResult:
        key = micro_batches.key
        flying: dict[tuple[int, int], InFlight] = {}
        self.borders.begin(self._due, key)
        for number, action in enumerate(self.actions):
            place = (action.stage, action.micro)
            self._look_ahead(number, key)
            if action.kind == "F":
                flying[place] = self.forward(action, key(action.micro), micro_batches.forward, micro_batches.loss)
                self.most_in_flight = max(self.most_in_flight, len({m for _, m in flying}))
            elif action.kind == "W":
                assert self.deferred is not None
                self.deferred.run(place, part=self.parts[action.stage], last=action in self.lasts)
            else:
                self.backward(action, key(action.micro), flying.pop(place))
            self.borders.release(self._received.get(action, ()))
        self.borders.wait_for_sends()
        self.engine.close_backward()
        return self.engine.step(lr_factor)

    def _look_ahead(self, number: int, key: Callable[[int], Any]) -> None:
        """Posts the receives of what this action needs and of what the next does, which arrives during this one."""
        for action in self.actions[number : number + 2]:
            message = _needs(action, self.num_stages)
            if message is not None and not self.borders.expect(message, key(action.micro)):
                break

    def forward(
        self,
        action: Action,
        key: Any,
        forward: Callable[[int], Any],
        loss: Callable[[int, Any], tuple[torch.Tensor, Any]],
    ) -> InFlight:
        stage, micro = action.stage, action.micro
        with BOOK.during("forward"):
            received = self.borders.receive(stage, micro, key)
        self.engine.owner.begin_forward(self.parts[stage])
        reach("stage: forward")
        deferring = self.deferred.watching((stage, micro)) if self.deferred is not None else nullcontext()
        with deferring:
            result, outputs = self.staged.run(stage, lambda: forward(micro), received)
            value = None
            if stage == self.num_stages - 1:
                value, count = loss(micro, result)
                self.engine.count(value, count)
                value = self.engine.learns_from(value)
        if stage < self.num_stages - 1:
            with BOOK.during("forward"):
                self.borders.send(stage, micro, key, outputs)
        return InFlight(received, outputs, value)

    def backward(self, action: Action, key: Any, flight: InFlight) -> None:
        stage, micro = action.stage, action.micro
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if flight.loss is not None:
            if flight.loss.requires_grad:
                roots, gradients = [flight.loss], [None]
        else:
            arrived = self.borders.receive_gradients(stage, micro, key)
            for output, gradient in zip((t for t in flight.sent if t.requires_grad), arrived, strict=True):
                roots.append(output)
                gradients.append(gradient)

        def run() -> None:
            if roots:
                with self.staged.at(stage, flight.received):
                    torch.autograd.backward(roots, gradients)
            # Sent before the last reductions: the stage before waits for it.
            if stage > 0:
                given = [each.gradient_or_zeros() for each in flight.received if each.learns]
                self.borders.send_gradients(stage, micro, given)

        reach("stage: backward")
        unsplit = action.kind == "BW"
        if self.deferred is not None and not unsplit:
            try:
                self.deferred.collect(run, part=self.parts[stage])
            except CheckpointError as error:
                raise NotRunnable(
                    f"{self.term}: the model uses torch.utils.checkpoint, but zero-bubble splits the backward, and "
                    "would repeat the forward again and again; use 1f1b, or leave the checkpoints out"
                ) from error
            self.engine.owner.release(root=False)
        else:
            self.engine.run_backward(run, last=self._ends_an_update(action), part=self.parts[stage])

    def _ends_an_update(self, action: Action) -> bool:
        """Whether the optimiser's next update has all its gradients with this backward."""
        return action in self.lasts

    def evaluate(self, key: Hashable, forward: Callable[[], Any]) -> Any:
        result = None
        for stage in sorted(self.staged.mine):
            received = self.borders.receive(stage, 0, key)
            self.engine.owner.begin_forward(self.parts[stage])
            output, outputs = self.staged.run(stage, forward, received)
            if stage < self.num_stages - 1:
                self.borders.send(stage, 0, key, outputs)
            else:
                result = output
        self.borders.wait_for_sends()
        self.engine.owner.release()
        return result

    def crossings(self, *, before: bool) -> dict[int, list[list[tuple[int, bool]]]]:
        """For each stage of this rank what crosses the border before (or behind) it, where another rank is there."""
        return self.borders.crossings(self.staged.mine, before=before)


def _needs(action: Action, num_stages: int) -> Message | None:
    """The message that an action waits for."""
    if action.kind == "F":
        return ("forward", action.stage, action.micro) if action.stage else None
    if action.kind in ("B", "BW"):
        return ("backward", action.stage + 1, action.micro) if action.stage < num_stages - 1 else None
    return None


def _makes(action: Action, num_stages: int) -> Message | None:
    """The message that an action sends."""
    if action.kind == "F":
        return ("forward", action.stage + 1, action.micro) if action.stage < num_stages - 1 else None
    return ("backward", action.stage, action.micro) if action.kind in ("B", "BW") and action.stage else None


def _sent_to(term: pp, rank: int) -> dict[tuple[str, int], list[Message]]:
    """What each other rank along pp sends to this one in a step, by kind, in the order in which it does."""
    num_stages = term.n * term.chunks
    found: dict[tuple[str, int], list[Message]] = {}
    for source, order in enumerate(actions(term)):
        for message in (_makes(action, num_stages) for action in order):
            if message is not None and source != rank:
                kind, border, _ = message
                to = border if kind == "forward" else border - 1
                if stage_rank(to, term.n, term.chunks, term.schedule) == rank:
                    found.setdefault((kind, source), []).append(message)
    return found


def _received_by_then(term: pp, rank: int) -> dict[Action, list[Message]]:
    """For each action of a rank what it sent that has surely been received: when something arrives from a rank, then
    all that the other did before sending it is done, and with it the receiving that this took."""
    everyone = actions(term)
    num_stages = term.n * term.chunks

    def home(stage: int) -> int:
        return stage_rank(stage, term.n, term.chunks, term.schedule)

    found: dict[Action, list[Message]] = {}
    seen = dict.fromkeys(range(term.n), 0)
    at = [{(a.kind == "F", a.stage, a.micro): n for n, a in enumerate(order) if a.kind != "W"} for order in everyone]
    for action in everyone[rank]:
        message = _needs(action, num_stages)
        if message is None:
            continue
        kind, border, micro = message
        maker = border - 1 if kind == "forward" else border
        other = home(maker)
        if other == rank:
            continue
        until = at[other][kind == "forward", maker, micro]
        for done in everyone[other][seen[other] : until]:
            taken = _needs(done, num_stages)
            if taken is not None and home(taken[1] - 1 if taken[0] == "forward" else taken[1]) == rank:
                found.setdefault(action, []).append(taken)
        seen[other] = max(seen[other], until)
    return found
