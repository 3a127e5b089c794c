"""Plain PyTorch in one process: the reference that every contestant is compared with.

Where batch norm keeps statistics of each replica (`batch_norm="local"`), it computes the shares of the batch one after
the other, as so many ranks would, and their gradients add up.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.compare.adapter import Adapter, Place, Replica, Trainee, optimizer_of
from shoal.job import Job, share
from shoal.runtime.step import build_model


class Serial(Replica):
    shares = 1

    def step(self, counter: int, lr_factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=False):
            group["lr"] = rate * lr_factor
        indices = self.order.indices(counter)
        self.zero()
        counted: Any = 0
        for rank in range(self.shares):
            batch = self.job.train.batch(share(indices, rank=rank, ranks=self.shares))
            total, count = self.job.loss_of(self.job.run_model(self.model, batch), batch)
            self.backward(total)
            counted = counted + count
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(counted)
        self.clip()
        self.update()


class PlainPyTorch(Adapter):
    title = "PyTorch, one process"
    same_as = "serial"
    single = True

    def build(self, job: Job, place: Place, *, shares: int = 1) -> Trainee:
        model: nn.Module = build_model(job)
        trainee = Serial(job, place, model, model, optimizer_of(job, model.named_parameters()))
        trainee.shares = shares
        return trainee


ADAPTER = PlainPyTorch
