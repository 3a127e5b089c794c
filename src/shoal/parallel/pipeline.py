"""Pipeline parallelism: this rank's stages, run in the order of a schedule.

Activations go to the next stage's rank as soon as they are there, gradients to the one before; a rank waits only for
what its next action needs. Gradients of parameters are accumulated over the micro-batches and reduced once, with the
last backward of their stage. The shapes that cross a border are told once, before the first tensor of such a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.group import BOOK
from shoal.comm.mesh import Members
from shoal.parallel.deferred import DeferredWeights
from shoal.parallel.engine import Engine
from shoal.parallel.stages import StagedModel
from shoal.strategy import pp
from shoal.strategy.schedule import Action, actions, last_backward, stage_rank

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)
MOST_DIMS = 8


@dataclass(frozen=True)
class Spec:
    """A tensor that crosses a border."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    learns: bool
    """Whether a gradient comes back for it."""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward through one stage."""

    received: list[torch.Tensor]
    sent: list[torch.Tensor]
    loss: torch.Tensor | None


class Pipeline:
    """Runs the steps of an engine whose model is in stages."""

    def __init__(self, engine: Engine, staged: StagedModel, members: Members, term: pp) -> None:
        self.engine, self.staged, self.members, self.term = engine, staged, members, term
        self.num_stages = term.n * term.chunks
        self.actions: list[Action] = actions(term)[members.index]
        self.parts = {stage: part for part, stage in enumerate(staged.mine)}
        self.lasts = {last_backward(self.actions, stage) for stage in staged.mine}
        self.specs: dict[tuple[int, Any, bool], list[Spec]] = {}
        """(Border before this stage, shapes of the micro-batch, whether it learns) -> what crosses it."""
        self.crossed: dict[int, list[Spec]] = {}
        """What crossed each border of this rank's stages in the last step, for one micro-batch."""
        self.deferred = DeferredWeights(engine.reduction) if term.schedule == "zero-bubble" else None
        self.most_in_flight = 0
        self._sends: list[tuple[Any, torch.Tensor]] = []
        self._local: dict[tuple[str, int, int], list[torch.Tensor]] = {}

    @property
    def holds_loss(self) -> bool:
        return self.num_stages - 1 in self.staged.mine

    def step(
        self,
        key: Callable[[int], Any],
        forward: Callable[[int], Any],
        loss: Callable[[int, Any], tuple[torch.Tensor, Any]],
    ) -> None:
        """All micro-batches of a step. `key(m)` tells micro-batches of different shapes apart, `forward(m)` calls the
        model, `loss(m, output)` is (sum, count)."""
        flying: dict[tuple[int, int], _InFlight] = {}
        for action in self.actions:
            place = (action.stage, action.micro)
            if action.kind == "F":
                flying[place] = self._forward(action, key(action.micro), forward, loss)
                self.most_in_flight = max(self.most_in_flight, len({m for _, m in flying}))
            elif action.kind == "W":
                assert self.deferred is not None
                self.deferred.run(place, part=self.parts[action.stage], last=action in self.lasts)
            else:
                self._backward(action, key(action.micro), flying.pop(place))
        self._wait_for_sends()
        self.engine.close_backward()

    def _forward(self, action: Action, key: Any, forward: Any, loss: Any) -> _InFlight:
        stage, micro = action.stage, action.micro
        with BOOK.during("forward"):
            received = self._receive(stage, micro, key)
        self._enter(stage)
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
                self._send(stage, micro, key, outputs)
        return _InFlight(received, outputs, value)

    def _enter(self, stage: int) -> None:
        if self.engine.gathering is not None:
            self.engine.gathering.begin_forward(self.parts[stage])

    def _backward(self, action: Action, key: Any, flight: _InFlight) -> None:
        stage, micro = action.stage, action.micro
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None] = []
        if flight.loss is not None:
            if flight.loss.requires_grad:
                roots, gradients = [flight.loss], [None]
        else:
            arrived = self._receive_gradients(stage, micro, key)
            for output, gradient in zip((t for t in flight.sent if t.requires_grad), arrived, strict=True):
                roots.append(output)
                gradients.append(gradient)

        def run() -> None:
            if roots:
                torch.autograd.backward(roots, gradients)
            # Sent before the last reductions: the stage before waits for it.
            if stage > 0:
                back = [t for t in flight.received if t.requires_grad]
                self._send_gradients(stage, micro, [t.grad if t.grad is not None else torch.zeros_like(t) for t in back])

        whole = action.kind == "BW"
        if self.deferred is not None and not whole:
            self.deferred.collect(run, part=self.parts[stage])
            if self.engine.gathering is not None:
                self.engine.gathering.finish(root=False)
        else:
            self.engine.run_backward(run, last=action in self.lasts, part=self.parts[stage])

    def evaluate(self, key: Any, forward: Callable[[], Any]) -> Any:
        """One batch through all stages, forward only; its output on the last stage, None elsewhere."""
        result = None
        for stage in sorted(self.staged.mine):
            received = self._receive(stage, 0, key)
            self._enter(stage)
            output, outputs = self.staged.run(stage, forward, received)
            if stage < self.num_stages - 1:
                self._send(stage, 0, key, outputs)
            else:
                result = output
        self._wait_for_sends()
        if self.engine.gathering is not None:
            self.engine.gathering.finish()
        return result

    def crossings(self, *, before: bool) -> dict[int, list[tuple[int, bool]]]:
        """For each stage of this rank what crosses the border before (or behind) it, where another rank is there."""
        found = {}
        for stage in self.staged.mine:
            border, other = (stage, stage - 1) if before else (stage + 1, stage + 1)
            if 0 <= other < self.num_stages and self._rank_of(other) != self._rank_of(stage):
                found[stage] = [(spec.bytes, spec.learns) for spec in self.crossed.get(border, ())]
        return found

    # Messages. A border is named by the stage behind it.

    def _rank_of(self, stage: int) -> int:
        return self.members.ranks[stage_rank(stage, self.term.n, self.term.chunks, self.term.schedule)]

    def _tag(self, kind: str, border: int, micro: int, leaf: int) -> int:
        kinds = ("specs", "forward", "backward")
        return ((kinds.index(kind) * self.num_stages + border) * self.term.micro + micro) * 16 + leaf

    def _send(self, stage: int, micro: int, key: Any, tensors: Sequence[torch.Tensor]) -> None:
        border = stage + 1
        learning = torch.is_grad_enabled()
        specs = [Spec(tuple(t.shape), t.dtype, learning and t.requires_grad) for t in tensors]
        to = self._rank_of(border)
        self.crossed[border] = specs
        if to == self.members.ranks[self.members.index]:
            self._local["forward", border, micro] = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
            return
        known = (border, key, learning)
        if known not in self.specs:
            self.specs[known] = specs
            with BOOK.during("setup"):
                self._post(_written(specs), to, self._tag("specs", border, micro, 0))
        elif self.specs[known] != specs:
            raise RuntimeError(
                f"a micro-batch crosses the border before stage {border} as {specs}, but one of the same input shapes "
                f"crossed it as {self.specs[known]}: the model's shapes depend on values, which a pipeline cannot carry"
            )
        for leaf, tensor in enumerate(tensors):
            self._post(tensor.detach(), to, self._tag("forward", border, micro, leaf))

    def _receive(self, stage: int, micro: int, key: Any) -> list[torch.Tensor]:
        if stage == 0:
            return []
        source = self._rank_of(stage - 1)
        if source == self.members.ranks[self.members.index]:
            return self._local.pop(("forward", stage, micro))
        known = (stage, key, torch.is_grad_enabled())
        device = next(self.engine.model.parameters()).device
        if known not in self.specs:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
            with BOOK.during("setup"):
                dist.recv(header, src=source, group=self.members.group, tag=self._tag("specs", stage, micro, 0))
            self.specs[known] = _read(header)
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self.specs[known]]
        self.crossed[stage] = self.specs[known]
        for leaf, tensor in enumerate(tensors):
            dist.recv(tensor, src=source, group=self.members.group, tag=self._tag("forward", stage, micro, leaf))
        for tensor, spec in zip(tensors, self.specs[known], strict=True):
            tensor.requires_grad_(spec.learns)
        return tensors

    def _send_gradients(self, stage: int, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        to = self._rank_of(stage - 1)
        if to == self.members.ranks[self.members.index]:
            self._local["backward", stage, micro] = list(gradients)
            return
        for leaf, gradient in enumerate(gradients):
            self._post(gradient, to, self._tag("backward", stage, micro, leaf))

    def _receive_gradients(self, stage: int, micro: int, key: Any) -> list[torch.Tensor]:
        border = stage + 1
        source = self._rank_of(border)
        if source == self.members.ranks[self.members.index]:
            return self._local.pop(("backward", border, micro))
        specs = [spec for spec in self.specs[border, key, True] if spec.learns]
        device = next(self.engine.model.parameters()).device
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        with BOOK.during("backward"):
            for leaf, tensor in enumerate(tensors):
                dist.recv(tensor, src=source, group=self.members.group, tag=self._tag("backward", border, micro, leaf))
        return tensors

    def _post(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        whole = tensor.contiguous()
        self._sends.append((dist.isend(whole, dst=to, group=self.members.group, tag=tag), whole))

    def _wait_for_sends(self) -> None:
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends = []


_HEADER = 1 + 16 * (3 + MOST_DIMS)


def _written(specs: Sequence[Spec]) -> torch.Tensor:
    """Specs as numbers, in a message of fixed size."""
    numbers = [len(specs)]
    for spec in specs:
        numbers += [DTYPES.index(spec.dtype), int(spec.learns), len(spec.shape), *spec.shape]
        numbers += [0] * (MOST_DIMS - len(spec.shape))
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _read(header: torch.Tensor) -> list[Spec]:
    count, *numbers = header.tolist()
    width = 3 + MOST_DIMS
    rows = [numbers[n * width : (n + 1) * width] for n in range(count)]
    return [Spec(tuple(row[3 : 3 + row[2]]), DTYPES[row[0]], bool(row[1])) for row in rows]
