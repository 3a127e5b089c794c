"""DeepSpeed, ZeRO stages 0 to 3, in float32 with the job's own optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shoal.compare.adapter import Adapter, Place, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model


class InEngine(Replica):
    engine: Any
    stage: int

    def zero(self) -> None:
        """The engine does it in its step."""

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def clip(self) -> None:
        """The engine does it in its step."""

    def update(self) -> None:
        self.engine.step()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                yield name, parameter.detach().clone()


class DeepSpeed(Adapter):
    packages = ("deepspeed",)

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.title = f"DeepSpeed ZeRO-{stage}"
        self.same_as = f"dp({{n}}, zero={stage})"

    def build(self, job: Job, place: Place) -> Trainee:
        import deepspeed

        # An all-reduce for inference only, which would be compiled for minutes when the engine starts.
        backend: Any = import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
        model = build_model(job)
        optimizer = optimizer_of(job, model.named_parameters())
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": max(1, job.global_batch // place.world),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": job.clip or 0.0,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "torch_autocast": {"enabled": False},
        }
        engine, wrapped, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        torch.set_num_threads(1)
        trainee = InEngine(job, place, model, engine, wrapped)
        trainee.engine, trainee.stage = engine, self.stage
        return trainee


ADAPTERS = {f"deepspeed-zero{stage}": DeepSpeed(stage) for stage in range(4)}
