"""DistributedDataParallel: gradients are averaged in buckets while backward goes on."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from shoal.comparison.adapter import Adapter, RankPlace, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model


class TorchDDP(Adapter):
    title = "PyTorch DDP"
    same_as = "dp({n})"

    def __init__(self, **options: Any) -> None:
        """`options`: of DistributedDataParallel."""
        self.options = options

    def build(self, job: Job, place: RankPlace) -> Trainee:
        model = build_model(job)
        # Buffers are averaged when the model is evaluated, for all contestants alike.
        forward = DistributedDataParallel(model, process_group=place.group, broadcast_buffers=False, **self.options)
        self.configure(forward, job, place)
        return Replica(job, place, model, forward, optimizer_of(job, model.named_parameters()))

    def configure(self, model: DistributedDataParallel, job: Job, place: RankPlace) -> None:
        """Registers communication hooks."""


ADAPTER = TorchDDP
