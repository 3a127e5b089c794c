"""`fully_shard` (FSDP2): parameters, gradients and optimiser state are sharded; each block is gathered when it runs."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shoal.comparison.adapter import Adapter, RankPlace, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.layout.blocks import blocks
from shoal.runtime.step import build_model


class FSDP2(Adapter):
    title = "PyTorch FSDP2"
    same_as = "dp({n}, zero=3)"

    def __init__(self, *, reshard_after_forward: bool = True) -> None:
        """`reshard_after_forward`: False keeps gathered parameters until backward."""
        self.reshard = reshard_after_forward

    def build(self, job: Job, place: RankPlace) -> Trainee:
        model = build_model(job)
        mesh = DeviceMesh.from_group(place.group, "cpu")
        for _, block in blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard)
        return Replica(job, place, model, model, optimizer_of(job, model.named_parameters()))


ADAPTER = FSDP2
