"""Adapters that break the protocol, each in one way. They train like DDP otherwise."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comparison.adapter import Adapter, RankPlace, Replica, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model


class Unfair(Adapter):
    title = "DDP with a fault"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def build(self, job: Job, place: RankPlace) -> Replica:
        if self.fault == "batch":
            job = replace(job, global_batch=job.global_batch // 2)
        if self.fault == "seed":
            job = replace(job, seed=job.seed + 1)
        if self.fault == "order":
            job = replace(job, train=Shifted(job.train))
        model = build_model(job)
        if self.fault == "layer":
            model.blocks[1] = nn.Identity()
        if self.fault == "unused layer":
            model.blocks[1].forward = lambda x: x
        forward: Any = model if self.fault in ("all-reduce", "unused layer") else DistributedDataParallel(model)
        optimizer = optimizer_of(job, model.named_parameters())
        kind = Outer if self.fault == "outer" else Late if self.fault == "compile" else Replica
        trainee = kind(job, place, model, forward, optimizer)
        if self.fault == "bf16 state":
            trainee = LowState(job, place, model, forward, optimizer)
        return trainee


class Shifted:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Any) -> Any:
        return self.data.batch((indices + 1) % len(self.data))


class LowState(Replica):
    def update(self) -> None:
        super().update()
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].bfloat16()

    def step(self, counter: int, lr_factor: float) -> None:
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].float()
        super().step(counter, lr_factor)


class Outer(Replica):
    """Nesterov momentum over the steps of AdamW."""

    def update(self) -> None:
        if not hasattr(self, "outer"):
            self.anchor = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
            self.outer = torch.optim.SGD(self.anchor, lr=0.7, momentum=0.9, nesterov=True)
        super().update()
        with torch.no_grad():
            for anchor, param in zip(self.anchor, self.model.parameters(), strict=True):
                anchor.grad = anchor - param
            self.outer.step()
            for anchor, param in zip(self.anchor, self.model.parameters(), strict=True):
                param.copy_(anchor)


class Late(Replica):
    """Compiles at its sixth step."""

    def step(self, counter: int, lr_factor: float) -> None:
        if counter == 5 * self.job.global_batch:
            from torch._dynamo.utils import counters

            counters["stats"]["unique_graphs"] += 1  # As `torch.compile` counts, without its minute.
            time.sleep(0.02)
        super().step(counter, lr_factor)


FAULTS = {
    "batch": "global-batch",
    "seed": "initial-parameters",
    "order": "samples",
    "layer": "model",
    "unused layer": "first-losses",
    "all-reduce": "replicas",
    "bf16 state": "optimizer-state",
    "outer": "outer-optimizer",
    "compile": "compilation",
}
ADAPTERS = {f"unfair-{fault.replace(' ', '-')}": Unfair(fault) for fault in FAULTS}
