"""Post-local SGD of PyTorch: replicas step by themselves, and average their parameters every `PERIOD` steps."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from shoal.compare.adapter import Adapter, Place, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model

PERIOD = 8


class PostLocalSGD(Adapter):
    title = f"PyTorch post-local SGD, averaged every {PERIOD} steps"
    same_as = f"dp({{n}}, sync=local({PERIOD}))"
    exact = False

    def build(self, job: Job, place: Place) -> Trainee:
        model = build_model(job)
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0, process_group=dist.group.WORLD)
        optimizer = PostLocalSGDOptimizer(optimizer_of(job, model.named_parameters()), averager)
        return Replica(job, place, model, model, optimizer)


ADAPTER = PostLocalSGD
