"""One shard of the model at a server: parameters, optimiser state, and the gradients that have arrived for it.

Gradients arrive as sums with a count. An update takes the mean of some of them, scaled by what clipping over all shards
leaves; the optimiser is the job's own, on slices (`optimizer.py`), exactly as a rank without servers runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.comm.compress.compressor import Compressor
from shoal.comm.transport.link import PeerLost
from shoal.parallel.flat import FlatBuffer, Slot
from shoal.parallel.flat_slice import unlike_the_rest
from shoal.parallel.optimizer import Recipe, SlicedOptimizer
from shoal.parallel.server.codec import PartOfBucket, PushCodec
from shoal.parallel.server.messages import DATA, Post
from shoal.parallel.server.state import ReceivedState, Table, state_table
from shoal.strategy.seats import Part
from shoal.strategy.terms.serving import Push


class HeldLayout:
    """Where parameters lie in a bucket of the workers, without their values."""

    runs = FlatBuffer.runs
    shards = 2
    """More than one: no server holds a full parameter for sure."""

    def __init__(self, padded: int, slots: Sequence[Sequence[Any]]) -> None:
        self.padded = padded
        nothing: Any = torch.empty(0)
        self.slots = [Slot(name, nothing, torch.Size(shape), start, options) for name, shape, start, options in slots]

    def within(self, start: int, stop: int) -> HeldLayout:
        """Only with the parameters of a range."""
        found = HeldLayout(self.padded, [])
        found.slots = [slot for slot in self.slots if start <= slot.start < stop]
        return found


class HeldPart:
    """A range of one bucket, as the optimiser sees it."""

    def __init__(self, layout: HeldLayout, offset: int, master: torch.Tensor, times: int) -> None:
        self.buffer, self.offset, self.master, self.times = layout, offset, master, times
        self.mean = torch.zeros_like(master)

    def reduced(self) -> torch.Tensor:
        return self.mean


class ServedShard:
    """Shard `index` of what one position of every replica holds."""

    def __init__(
        self,
        recipe: Recipe,
        index: int,
        ranks: Sequence[int],
        up: Post,
        down: Post,
        *,
        compress: tuple[Compressor, int] | None = None,
    ) -> None:
        """`ranks`: the workers at this position, by replica; `compress`: how they compress pushes, and the seed."""
        self.recipe, self.index, self.ranks, self.up, self.down = recipe, index, ranks, up, down
        self._compress = compress
        self.codec: PushCodec | None = None
        self._base = 0
        self.parts: list[HeldPart] = []
        self.pushed: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Gradients by worker and number."""
        self._posted: dict[int, tuple[int, list[torch.Tensor], list[Any]]] = {}
        self._read: dict[int, list[torch.Tensor]] = {}
        """What each worker has read last."""
        self._copies: list[torch.Tensor] | None = None

    def load(self, table: dict[str, Any], tensors: list[torch.Tensor], step: int) -> None:
        """Takes parameters and state of a step from a worker of the first replica."""
        layouts = [HeldLayout(padded, slots) for padded, slots in table["buckets"]]
        rows = [(Part(*part), offset, times) for *part, offset, times in table["parts"]]
        masters, kept = tensors[: len(rows)], tensors[len(rows) :]
        layouts_of = [layouts[part.bucket] for part, _, _ in rows]
        if not self.recipe.elementwise:  # Then no parameter is cut.
            layouts_of = [
                layout.within(offset + part.start, offset + part.stop)
                for layout, (part, offset, _) in zip(layouts_of, rows, strict=True)
            ]
        self.parts = [
            HeldPart(layout, offset + part.start, master.clone(), times)
            for layout, (part, offset, times), master in zip(layouts_of, rows, masters, strict=True)
        ]
        saved = ReceivedState([(table["state"], kept)])
        names = {slot.name for part in self.parts for slot in part.buffer.slots}
        buckets: Any = self.parts
        unfused = unlike_the_rest(saved, sorted(names)) if self.recipe.elementwise else frozenset()
        self.optimizer = SlicedOptimizer(self.recipe, buckets, unfused=unfused)
        self.optimizer.load(saved)
        self._copies = None
        # Workers have pushed as often as was received when they took up the run.
        self._base = step - min((number for number, _, _ in self._posted.values()), default=0)
        if self._compress is not None:
            term, seed = self._compress
            self.codec = PushCodec(
                [
                    PartOfBucket(
                        layouts[part.bucket].slots,
                        master.dtype,
                        offset + part.start,
                        offset + part.stop,
                        worker=0,
                        workers=len(self.ranks),
                        writes_errors=False,
                    )
                    for (part, offset, _), master in zip(rows, masters, strict=True)
                ],
                term,
                seed=seed,
                clip=None,
            )
        if not self._posted:
            for worker in range(len(self.ranks)):
                self._post(worker, 0)

    def state(self) -> Table:
        return state_table(self.optimizer)

    # Gradients:

    def _post(self, worker: int, number: int) -> None:
        source = self.ranks[worker]
        if self.codec is not None:
            # Its size depends on the step, which is known only once training begins: received when it is asked for.
            self._posted[worker] = number, [], []
            return
        tensors = [torch.empty_like(part.master) for part in self.parts]
        tasks = [self.up.receive(source, DATA + at, tensor) for at, tensor in enumerate(tensors)]
        self._posted[worker] = number, tensors, tasks

    def take(self, worker: int, number: int) -> bool:
        """Waits for a gradient that is on its way; whether it has come."""
        while (worker, number) not in self.pushed:
            at, tensors, tasks = self._posted[worker]
            try:
                if self.codec is not None:
                    tensors, tasks = self._receive(self.codec, worker, self._base + at)
                for task in tasks:
                    self.up.wait(task)
            except PeerLost:
                return False
            if self.codec is not None:
                step = self._base + at
                tensors = [self.codec.decode(n, each, worker=worker, step=step) for n, each in enumerate(tensors)]
            self.pushed[worker, at] = tensors
            self._post(worker, at + 1)
        return True

    def _receive(self, codec: PushCodec, worker: int, step: int) -> tuple[list[torch.Tensor], list[Any]]:
        tensors = [torch.empty(codec.size(at, step), dtype=torch.uint8) for at in range(len(self.parts))]
        source = self.ranks[worker]
        return tensors, [self.up.receive(source, DATA + at, tensor) for at, tensor in enumerate(tensors)]

    def average(self, pushes: Sequence[Push], compensation: float) -> float:
        """The mean of these gradients, and the square of its norm."""
        total = sum(push.count for push in pushes) or 1.0
        squares = 0.0
        for at, part in enumerate(self.parts):
            part.mean.zero_()
            for push in pushes:
                gradient = self.pushed[push.worker, push.number][at]
                unit = push.count if self.codec is not None else 1.0  # A codec gives means, not sums.
                if compensation:
                    # DC-ASGD (Zheng et al. 2017): the diagonal of the outer product stands for the Hessian.
                    mean = gradient * (unit / (push.count or 1.0))
                    moved = part.master - self._read[push.worker][at]
                    part.mean.add_(mean + compensation * mean * mean * moved, alpha=push.count / total)
                else:
                    part.mean.add_(gradient, alpha=unit)
            if not compensation:
                part.mean.div_(total)
            squares += float(torch.linalg.vector_norm(part.mean).double() ** 2) / part.times
        return squares

    def forget(self, pushes: Sequence[Push]) -> None:
        for push in pushes:
            self.pushed.pop((push.worker, push.number), None)

    def update(self, scale: float, lr_factor: float, unused: frozenset[str]) -> None:
        for part in self.parts:
            if scale != 1.0:
                part.mean.mul_(scale)
        if self.recipe.elementwise and not unused <= self.optimizer.unfused:
            self.optimizer.regroup(self.optimizer.unfused | unused)
        self.optimizer.step(lr_factor=lr_factor, without=unused)
        self._copies = None

    def send(self, worker: int) -> None:
        """The present parameters, to a worker."""
        if self._copies is None:  # An update must not change what is still being sent.
            self._copies = [part.master.clone() for part in self.parts]
        self._read[worker] = self._copies
        for at, copy in enumerate(self._copies):
            # A worker receives the parts of several shards with tags of their own.
            self.down.send(self.ranks[worker], DATA + at, copy)
