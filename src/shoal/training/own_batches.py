"""Whole batches in a loop of one's own: what the axes that cut the model need.

Under pp stages run in an order of their own, under cp each rank reads its own positions, and under tp all ranks draw
the same masks; so the engine is given a batch and calls the model itself, as it does for a Job. It infers from an
example of a batch, and from the loss, how the model may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shoal.job import Batch, Job, JobError, TensorData
from shoal.job.elementwise import Probe
from shoal.job.random_optimizer import UpdateDraws, draws_numbers
from shoal.job.randomness import Randomness
from shoal.layout.layout import facts_of, layout_of
from shoal.parallel.apply import executor_for, parallelize
from shoal.parallel.placement import mesh_of
from shoal.parallel.result import StepResult
from shoal.runtime.draws import cuts_of, places_of
from shoal.runtime.setup import precision_of
from shoal.runtime.step import StepRunner
from shoal.strategy import Strategy, require_legal

if TYPE_CHECKING:
    from shoal.launch.join import Rank
    from shoal.parallel.engine import Engine


class GivenBatch:
    """The batch that the caller has just given, as data by index."""

    def __init__(self, batch: Mapping[str, torch.Tensor]) -> None:
        self.now: Batch = dict(batch)

    def __len__(self) -> int:
        return len(next(iter(self.now.values())))

    def batch(self, indices: np.ndarray) -> Batch:
        rows = torch.as_tensor(indices)
        return {name: values[rows] for name, values in self.now.items()}


@dataclass
class GivenOrder:
    """All samples of the batch that was given."""

    data: GivenBatch

    def indices(self, counter: int) -> np.ndarray:
        return np.arange(len(self.data))

    def next(self, counter: int) -> int:
        return counter + len(self.data)


class OwnBatches:
    """Trains and evaluates batches through an engine."""

    def __init__(self, runner: StepRunner, train: GivenBatch, validation: GivenBatch) -> None:
        self.runner, self._train, self._validation, self._job = runner, train, validation, runner.job
        self.steps, self.samples = 0, 0

    @property
    def engine(self) -> Engine:
        return self.runner.engine

    def train(self, batch: Mapping[str, torch.Tensor], lr_factor: float) -> StepResult:
        """One step on a global batch, which every rank is given alike."""
        self._train.now = _as_expected(batch, self._train.now)
        # A job's factor is that of a step; here the caller gives it.
        self.runner.job = self._job if lr_factor == 1.0 else replace(self._job, schedule=lambda step: lr_factor)
        result = self.runner.step(self.steps, self.samples)
        self.steps, self.samples = self.steps + 1, self.samples + len(self._train)
        return result

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The metrics of a batch, or the loss, the same on every rank."""
        self._validation.now = _as_expected(batch, self._validation.now)
        return self.runner.evaluate()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        strategy: Strategy,
        me: Rank,
        tried: Probe,
        *,
        example: Mapping[str, torch.Tensor],
        loss: Callable[..., Any] | None,
        inputs: Any,
        metrics: Any,
        **given: Any,
    ) -> OwnBatches:
        """Makes a model train by a strategy with any axes. All ranks call it alike."""
        if loss is None:
            raise ValueError("shoal.engine: example= was given without loss=; give (output, batch) -> (sum, count)")
        train, validation = GivenBatch(example), GivenBatch(example)
        untouched = deepcopy(model)
        job = Job(
            name=type(model).__name__,
            model=lambda: deepcopy(untouched),
            train=TensorData(**example),
            loss=loss,
            inputs=inputs,
            metrics=metrics,
            global_batch=len(train),
            steps=1,
            **given,
        )
        layout = layout_of(job, strategy)
        require_legal(strategy, world=me.world, facts=facts_of(job, layout))
        mesh = mesh_of(strategy, rank=me.rank, backend=me.backend)
        randomness = Randomness(job.seed, places_of(job, model, None))
        engine = parallelize(
            model,
            strategy,
            mesh,
            optimizer=job.optimizer,
            options=job.options,
            clip=job.clip,
            elementwise=tried.elementwise,
            coupled=tried.coupled,
            batch_norm=job.batch_norm,
            layout=layout,
            seed=job.seed,
            randomness=randomness,
            average=job.ema,
            update_draws=UpdateDraws(job.seed) if draws_numbers(job.optimizer) else None,
        )
        randomness.numbers.cuts = cuts_of(engine)
        plain = replace(job, train=train, validation=validation, model=lambda: model)
        runner = StepRunner(
            plain, executor_for(engine, strategy), strategy, randomness, autocast=precision_of(strategy)
        )
        runner.order = GivenOrder(train)  # type: ignore[assignment]
        return cls(runner, train, validation)


def _as_expected(batch: Mapping[str, torch.Tensor], before: Batch) -> Batch:
    """The batch, if it has the entries of the example."""
    if not isinstance(batch, Mapping) or batch.keys() != before.keys():
        got = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise JobError(f"a batch with {sorted(before)} was expected, as in example=, and {got} was given")
    sizes = {name: len(values) for name, values in batch.items()}
    if len(set(sizes.values())) != 1 or not min(sizes.values()):
        raise JobError(f"the entries of a batch have {sizes} samples; expected the same number, at least 1")
    return dict(batch)
