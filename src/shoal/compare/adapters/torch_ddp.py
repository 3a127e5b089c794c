"""DistributedDataParallel: gradients are averaged in buckets while backward goes on."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from shoal.compare.adapter import Adapter, Place, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model


class TorchDDP(Adapter):
    title = "PyTorch DDP"
    same_as = "dp({n})"

    def build(self, job: Job, place: Place) -> Trainee:
        model = build_model(job)
        # Buffers are averaged when the model is evaluated, for all contestants alike.
        forward = DistributedDataParallel(model, process_group=place.group, broadcast_buffers=False)
        self.configure(forward, place)
        return Replica(job, place, model, forward, optimizer_of(job, model.named_parameters()))

    def configure(self, model: DistributedDataParallel, place: Place) -> None:
        """Registers communication hooks."""


ADAPTER = TorchDDP
