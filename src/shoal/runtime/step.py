"""One step of a job under an engine: fetch this rank's share, forward, backward, update. Also one evaluation.

What a rank computes in a step is a function of (seed, sample counter): the samples, and the random numbers that
dropout draws, each sample its own (`job/randomness.py`). So a resumed run goes on to the bit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.comm.points import reach
from shoal.job import Batch, Job, share
from shoal.job.draw_rules import key_of
from shoal.job.facts import require_initialised
from shoal.job.on_disk import built_on_disk
from shoal.job.randomness import Randomness
from shoal.parallel.batch_norm import batch_norms, couples_samples
from shoal.parallel.executor import Executor
from shoal.parallel.global_loss import GlobalLoss
from shoal.parallel.result import StepResult
from shoal.runtime.read_ahead import ReadAhead, require_readable_ahead
from shoal.strategy import Strategy


def seed_at(seed: int, sample: int) -> int:
    """The random seed of the micro-batch whose first sample has this counter."""
    return int(np.random.SeedSequence([seed, sample]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def cast(batch: Batch, dtype: torch.dtype | None) -> Batch:
    """The batch with its floating-point entries in the model's precision."""
    if dtype is None:
        return batch
    return {k: _as(v, dtype) for k, v in batch.items()}


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the precision of a real type: complex tensors keep their imaginary part, whole numbers stay as they are."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class BatchPart:
    """One rank's part of a micro-batch."""

    batch: Batch
    seed: int
    """Of what is drawn at random in its forward without a place of its own."""
    samples: range
    """Counters of its samples."""
    over_tensor: tuple[int, ...]
    """The same where regions of tp gather the samples of several ranks."""
    step: int
    """Counter of the step's first sample."""
    placeholder: bool
    """Whether it counts for nothing."""
    everyone: Batch | None = None
    """The micro-batch of all ranks, where the loss is one of the global batch."""

    @property
    def num_samples(self) -> int:
        """How many samples count."""
        return 0 if self.placeholder else len(next(iter(self.batch.values())))

    @property
    def shapes(self) -> tuple[Any, ...]:
        return shapes_of(self.batch)


def shapes_of(batch: Batch) -> tuple[Any, ...]:
    return tuple((name, tuple(entry.shape)) for name, entry in batch.items())


class StepRunner:
    """Runs a job's steps through an executor."""

    def __init__(
        self,
        job: Job,
        executor: Executor,
        strategy: Strategy,
        randomness: Randomness,
        *,
        autocast: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.job = job
        self.executor = executor
        self.engine = engine = executor.engine
        self.randomness = randomness
        randomness.steps_in_flight = executor.steps_in_flight
        self.order = job.order()
        self.strategy = strategy
        self.micro_batches = strategy.micro_batches
        self.last_batches: list[Batch] = []
        """The micro-batches of the last step: their shapes determine what it should send."""
        self.share: int | None = None
        """Which share of the batch this island computes, where that is another one from step to step (tickets)."""
        self.spent = {"data": 0.0, "forward": 0.0}
        """Seconds since the start."""
        self.last_total = 0
        """Samples of the last global batch."""
        self.ahead: ReadAhead | None = None
        self.steps_ahead = 0
        self.before_step: Callable[[], None] = lambda: None
        """Called first in every step."""
        self.autocast = autocast
        self.dtype = dtype
        self.device = next(engine.model.parameters()).device
        over_all = job.loss_over == "batch" and engine.placement.samples.size > 1
        self.global_loss = GlobalLoss(engine.placement.samples) if over_all else None
        self.planes = engine.cut.planes
        if self.planes is not None:
            self.planes.keeps_outputs = self.global_loss is None
        if self.global_loss is not None:
            engine.counts_loss = engine.counts_loss and self.global_loss.counts

    @property
    def couples_samples(self) -> bool:
        return couples_samples(self.engine.model)

    def step(self, step: int, counter: int) -> StepResult:
        """Trains on the global batch that starts at `counter`."""
        job, engine = self.job, self.engine
        indices = self.order.indices(counter)
        engine.model.train()
        self.before_step()
        if engine.update_draws is not None:
            engine.update_draws.begin(counter)
        parts = [self.part(micro, indices, counter) for micro in range(self.micro_batches)]
        if self.ahead is not None:
            self.ahead.expect(self._coming(counter))
        engine.owner.settle()  # Parameters that servers send arrive while samples are fetched.
        if engine.buffers is not None:
            engine.buffers.begin(sum(part.num_samples for part in parts))
        result = self.executor.step(_MicroBatches(self, parts), lr_factor=job.lr_factor(step))
        self.last_batches, self.last_total = [part.batch for part in parts], len(indices)
        return result

    def read_outside(self, counter: int) -> list[str]:
        """Under zero=3, parameters that a forward of the batch at `counter` reads outside of their block's own forward,
        where they are NaN. All ranks of an island call it alike."""
        engine = self.engine
        reads = engine.owner.watch_reads()
        if reads is None or engine.pipelined:
            return []
        part = self.part(0, self.order.indices(counter), counter)
        with torch.no_grad(), reads:
            self.loss(part, self.forward(part))
        engine.owner.release()
        BOOK.take()
        rows = exchange({"names": reads.names}, None if engine.outer is None else engine.placement.island)
        return sorted({name for row in rows for name in row["names"]})

    def part(self, micro: int, indices: np.ndarray, counter: int) -> BatchPart:
        """This rank's part of a micro-batch."""
        positions = np.arange(len(indices))
        mine = self._mine(micro, positions)
        first = int(mine[0]) if len(mine) else len(indices)
        placeholder = not len(mine) and not self.couples_samples
        data = self.job.train if self.ahead is None else self.ahead
        batch, *rest = (self._fetch(data, each) for each in self._read(micro, indices))
        everyone = rest[0] if rest else None
        start, num = counter + first, 1 if placeholder else len(mine)
        seed, over_tensor = seed_at(self.job.seed, start), self._over_tensor(micro, positions, counter)
        return BatchPart(batch, seed, range(start, start + num), over_tensor, counter, placeholder, everyone)

    def _mine(self, micro: int, positions: np.ndarray) -> np.ndarray:
        place, ranks = self._places()
        return share(positions, rank=place, ranks=ranks, micro=micro, micros=self.micro_batches)

    def _read(self, micro: int, indices: np.ndarray) -> list[np.ndarray]:
        """The indices that are read for a micro-batch."""
        mine = self._mine(micro, np.arange(len(indices)))
        # A rank without samples (the short batch at an epoch's end) still takes part in every collective. Batch norm
        # must not see a placeholder, so there it computes on nothing; elsewhere on one sample that counts for nothing.
        own = indices[mine] if len(mine) or self.couples_samples else indices[:1]
        return [own] if self.global_loss is None else [own, indices]

    def _coming(self, counter: int) -> list[np.ndarray]:
        """What the next steps will read, if this island computes the same share of them."""
        found = []
        for _ in range(self.steps_ahead):
            counter = self.order.next(counter)
            indices = self.order.indices(counter)
            found += [each for micro in range(self.micro_batches) for each in self._read(micro, indices)]
        return found

    def read_ahead(self, steps: int, *, loaders: int, processes: bool, counter: int) -> None:
        """From here on, threads or processes read the batches of the next steps while one computes."""
        require_readable_ahead(self.job.train, self.order.indices(counter)[:1])
        self.ahead, self.steps_ahead = ReadAhead(self.job.train, loaders=loaders, processes=processes), steps

    def stop_reading(self) -> None:
        """Ends what reads ahead."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def _places(self) -> tuple[int, int]:
        """This rank's place among those that split the batch, and how many they are."""
        split, mine, seats = self.engine.placement.split, self.engine.placement.samples, self.engine.placement.seats
        racing, outer = self.engine.placement.hogwild, self.engine.outer
        if self.share is None:
            return split.index, split.size
        if seats is not None or racing is not None:
            shares = seats.replicas if seats is not None else racing.size if racing is not None else 1
        else:
            assert outer is not None
            assert outer.tickets is not None
            shares = outer.tickets.shares
        return self.share * mine.size + mine.index, shares * mine.size

    def _over_tensor(self, micro: int, positions: np.ndarray, counter: int) -> tuple[int, ...]:
        place = self.engine.placement
        if not place.batch_over_tp:
            return ()
        here, ranks = self._places()
        # Those along tp are neighbours among the ranks that split the batch.
        offsets = [place.split.ranks.index(rank) - place.split.index for rank in place.tensor.ranks]
        shares = [
            share(positions, rank=here + offset, ranks=ranks, micro=micro, micros=self.micro_batches)
            for offset in offsets
        ]
        return tuple(counter + int(position) for mine in shares for position in mine)

    def forward(self, part: BatchPart) -> Any:
        reach("step: forward")
        started = time.perf_counter()
        draw_from(key_of(part.seed, *self.randomness.numbers.cuts.salt) >> 1, self.device)
        placed = self.randomness.forward(part.samples, part.step, part.over_tensor)
        saving = self._saving(part.batch)
        with BOOK.during("forward"), self._precision(), placed, saving, self._on_parts():
            output = self.job.run_model(self.engine.model, part.batch)
        self.spent["forward"] += time.perf_counter() - started
        return output

    def loss(self, part: BatchPart, output: Any) -> tuple[torch.Tensor, Any]:
        saving = self._saving(part.batch, again=True)
        with BOOK.during("forward"), self._precision(), self.randomness.resumed(), saving, self._on_parts():
            if self.global_loss is not None:
                return self.job.loss_of(*self._gathered(output, part.batch, part.everyone, none=part.placeholder))
            loss, count = self.job.loss_of(output, self._as_the_loss_reads(part.batch))
        return (loss * 0.0, 0.0) if part.placeholder else (loss, count)

    def _gathered(self, output: Any, batch: Batch, everyone: Batch | None, *, none: bool) -> tuple[Any, Batch]:
        """The outputs of all ranks, and the batch that they are of."""
        assert self.global_loss is not None
        assert everyone is not None
        mine, total = (len(next(iter(entries.values()))) for entries in (batch, everyone))
        return self.global_loss.gathered(output, mine=0 if none else mine, total=total), everyone

    def _as_the_loss_reads(self, batch: Batch) -> Batch:
        sequence = self.engine.cut.sequence
        return batch if sequence is None else sequence.batch(batch)

    def _fetch(self, data: Any, indices: np.ndarray) -> Batch:
        started = time.perf_counter()
        batch = cast(data.batch(indices), self.dtype)
        self.spent["data"] += time.perf_counter() - started
        if self.device.type == "cpu":
            return batch
        # From pinned memory, so that the host does not wait for the device.
        return {k: v.pin_memory().to(self.device, non_blocking=True) for k, v in batch.items()}

    def _on_parts(self) -> Any:
        """Where planes are cut: functions compute on this rank's part of them."""
        return nullcontext() if self.planes is None else self.planes.active()

    def _saving(self, batch: Batch, *, again: bool = False) -> Any:
        """What autograd saves meanwhile goes to where activations are offloaded."""
        activations = self.engine.activations
        return nullcontext() if activations is None else activations.saving(batch.values(), again=again)

    def _precision(self) -> Any:
        # The cache would keep a copy of every weight during all of forward, also of blocks that ZeRO-3 gave back.
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    def evaluate(self, watch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The job's validation values over the full validation set, the same on every rank."""
        job, engine = self.job, self.engine
        if job.validation is None:
            return {}
        samples = engine.placement.split
        totals: dict[str, list[float]] = {}
        self.executor.settle()
        engine.model.eval()
        with BOOK.during("evaluate"), torch.no_grad(), self._precision(), self.randomness.off():
            for start in range(0, len(job.validation), job.global_batch):
                batch_of_all = np.arange(start, min(start + job.global_batch, len(job.validation)))
                mine = share(batch_of_all, rank=samples.index, ranks=samples.size)
                # Every rank runs every batch: with ZeRO-3 a forward is a collective.
                # Statistics of the batch must not see a placeholder.
                empty = not len(mine) and not self._batch_statistics
                batch = self._fetch(job.validation, batch_of_all[:1] if empty else mine)
                everyone = self._fetch(job.validation, batch_of_all) if self.global_loss is not None else None
                for name, (total, count) in self._measured(batch, everyone, none=not len(mine)).items():
                    sums = totals.setdefault(name, [0.0, 0.0])
                    if (len(mine) or everyone is not None) and engine.counts_loss:
                        sums[0] += float(total)
                        sums[1] += float(count)
                watch()
            reach("evaluate: measured")
            totals = self._of_all(totals)
        engine.model.train()
        return job.summarise({name: (row[0], row[1]) for name, row in totals.items()})

    @property
    def _batch_statistics(self) -> bool:
        """Whether some batch norm keeps no running statistics, so that it takes the batch's in evaluation too."""
        return any(norm.running_mean is None for _, norm in batch_norms(self.engine.model))

    def _measured(self, batch: Batch, everyone: Batch | None, *, none: bool) -> dict[str, Any]:
        """What the job measures on a batch; nothing where another rank has the end of the model."""
        job = self.job
        output = self.executor.evaluate(shapes_of(batch), lambda: self._output(batch))
        if not self.executor.holds_loss:
            return {}
        with self._on_parts():
            if everyone is not None:
                return job.measure(*self._gathered(output, batch, everyone, none=none))
            return job.measure(output, self._as_the_loss_reads(batch))

    def _output(self, batch: Batch) -> Any:
        with self._on_parts():
            return self.job.run_model(self.engine.model, batch)

    def _of_all(self, totals: dict[str, list[float]]) -> dict[str, list[float]]:
        """Sums over all ranks, some of which may not know what is measured."""
        world = self.engine.placement.world
        if world.group is None:
            return totals
        if self.engine.pipelined:
            rows = exchange({"names": list(totals)}, self.engine.placement.survivors)
            names = next(row["names"] for row in rows if row["names"])
            totals = {name: totals.get(name, [0.0, 0.0]) for name in names}
        flat = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(flat, group=world.group)
        return dict(zip(totals, flat.tolist(), strict=True))


@dataclass(frozen=True)
class _MicroBatches:
    """This rank's micro-batches of a step, for an executor to run."""

    runner: StepRunner
    parts: list[BatchPart]

    def __len__(self) -> int:
        return len(self.parts)

    def key(self, micro: int) -> Hashable:
        return self.parts[micro].shapes

    def forward(self, micro: int) -> Any:
        return self.runner.forward(self.parts[micro])

    def loss(self, micro: int, output: Any) -> tuple[torch.Tensor, Any]:
        return self.runner.loss(self.parts[micro], output)


def build_model(job: Job, dtype: torch.dtype | None = None, *, on_disk: bool = False) -> nn.Module:
    """The job's model with its seeded start: the same on every rank and in the serial run. `on_disk`: its large tensors
    lie in files until they are cut."""
    torch.manual_seed(job.seed)
    model, why = built_on_disk(job.model) if on_disk else (job.model(), "")
    if why:
        text = f"the full model was built in memory, since its tensors cannot lie in files ({why}); "
        warnings.warn(text + "set TMPDIR to a folder with room for the model once per rank", stacklevel=2)
    require_initialised(model, job.name)
    return model if dtype is None else model._apply(lambda tensor: _as(tensor, dtype))


def draw_from(seed: int, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
    """Seeds what dropout draws from. Not by `torch.manual_seed`, which formats a stack trace for each kind of device
    that is not there and never frees it: a millisecond a micro-batch."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
