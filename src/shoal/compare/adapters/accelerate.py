"""Hugging Face Accelerate: the model and the optimiser are prepared by an Accelerator, which wraps them in DDP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.compare.adapter import Adapter, Place, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model


class Accelerated(Replica):
    accelerator: Any

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self) -> None:
        if self.job.clip is not None:
            self.accelerator.clip_grad_norm_(self.forward.parameters(), self.job.clip)

    def close(self) -> None:
        self.accelerator.free_memory()


class Accelerate(Adapter):
    title = "Hugging Face Accelerate (DDP)"
    packages = ("accelerate",)
    same_as = "dp({n})"

    def build(self, job: Job, place: Place) -> Trainee:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        model = build_model(job)
        handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
        forward, optimizer = accelerator.prepare(model, optimizer_of(job, model.named_parameters()))
        trainee = Accelerated(job, place, model, forward, optimizer)
        trainee.accelerator = accelerator
        return trainee


ADAPTER = Accelerate
