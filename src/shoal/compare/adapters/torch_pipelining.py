"""Pipelines of `torch.distributed.pipelining`: the model is exported, split, and run by the 1F1B schedule.

The pieces before which it is split are those that balance Shoal's own stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from shoal.compare.adapter import Adapter, Place, Trainee, optimizer_of
from shoal.job import Job
from shoal.layout.layout import layout_of
from shoal.runtime.step import build_model
from shoal.strategy import parse

MICRO = 4


class Stage(Trainee):
    """One stage of the model on this rank."""

    def __init__(self, job: Job, place: Place) -> None:
        super().__init__(job, place)
        model = build_model(job)
        self.shapes = {name: (each.shape, each.dtype) for name, each in model.named_parameters()}
        example = job.train.batch(self.order.indices(0)[: job.global_batch // MICRO])
        self.entries = list(job.inputs)
        split = {path: SplitPoint.BEGINNING for path in _starts(job, place.world)}
        pipe = pipeline(model, mb_args=tuple(example[name] for name in self.entries), split_spec=split)
        self.stage = pipe.build_stage(place.rank, torch.device("cpu"), place.group)
        self.part: nn.Module = self.stage.submod
        self.optimizer = optimizer_of(job, self.part.named_parameters())
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.counted: list[float] = []
        # The counts are known after the step: gradients are sums until then.
        self.schedule = Schedule1F1B(self.stage, MICRO, loss_fn=self._loss, scale_grads=False)
        self.target: Iterator[dict[str, Tensor]] = iter(())

    def _loss(self, output: Tensor, _: Tensor) -> Tensor:
        total, count = self.job.loss_of(output, next(self.target))
        self.counted.append(float(count))
        return total

    def step(self, counter: int, lr_factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * lr_factor
        batch = self.job.train.batch(self.order.indices(counter))
        parts = {name: entry.chunk(MICRO) for name, entry in batch.items()}
        self.target = ({name: parts[name][micro] for name in parts} for micro in range(MICRO))
        self.counted.clear()
        self.optimizer.zero_grad(set_to_none=True)
        first, last = self.place.rank == 0, self.place.rank == self.place.world - 1
        inputs = [batch[name] for name in self.entries] if first else []
        target = {"target": next(iter(batch.values()))} if last else {}
        self.schedule.step(*inputs, **target)
        gradients = [each.grad for each in self.part.parameters() if each.grad is not None]
        squares = torch.nn.utils.get_total_norm(gradients).square() if gradients else torch.zeros(())
        figures = torch.tensor([float(squares), sum(self.counted)], dtype=torch.float64)
        dist.all_reduce(figures, group=self.place.group)
        norm, count = float(figures[0]) ** 0.5 / float(figures[1]), float(figures[1])
        scale = 1.0 if self.job.clip is None else min(1.0, self.job.clip / (norm + 1e-6))
        torch._foreach_mul_(gradients, scale / count)
        self.optimizer.step()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        mine = dict(self.part.named_parameters())
        owners: list[list[str] | None] = [None] * self.place.world
        dist.all_gather_object(owners, list(mine), group=self.place.group)
        for name, (shape, dtype) in self.shapes.items():
            owner = next(rank for rank, names in enumerate(owners) if names is not None and name in names)
            value = mine[name].detach() if owner == self.place.rank else torch.empty(shape, dtype=dtype)
            dist.broadcast(value, owner, group=self.place.group)
            yield name, value


def _starts(job: Job, stages: int) -> list[str]:
    strategy = parse(f"pp({stages}, '1f1b', micro={MICRO})")
    layout = layout_of(job, strategy)
    assert layout.chain is not None
    return [layout.chain.links[first].path for first, _ in layout.stages(stages)[1:]]


class Pipelining(Adapter):
    title = f"PyTorch pipelining, 1F1B, {MICRO} micro-batches"
    same_as = f"pp({{n}}, '1f1b', micro={MICRO})"

    def refuses(self, job: Job, world: int) -> str:
        if world == 1:
            return "one rank has nothing to split"
        if isinstance(job.inputs, Mapping):
            return "its inputs are keyword arguments, and stages take positions only"
        if job.global_batch % MICRO:
            return f"the global batch of {job.global_batch} does not divide into {MICRO} equal micro-batches"
        return ""

    def build(self, job: Job, place: Place) -> Trainee:
        return Stage(job, place)


ADAPTER = Pipelining
