"""Lightning Fabric: the loop is the user's, the model and the optimiser are set up by Fabric under its DDP strategy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.compare.adapter import Adapter, Place, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model


class InFabric(Replica):
    fabric: Any

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self) -> None:
        if self.job.clip is not None:
            self.fabric.clip_gradients(self.forward, self.optimizer, max_norm=self.job.clip)


class Lightning(Adapter):
    title = "Lightning Fabric (DDP)"
    packages = ("lightning_fabric",)
    same_as = "dp({n})"

    def build(self, job: Job, place: Place) -> Trainee:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import LightningEnvironment
        from lightning_fabric.strategies import DDPStrategy

        class Joined(LightningEnvironment):
            """The ranks have joined before: nothing is launched."""

            @property
            def creates_processes_externally(self) -> bool:
                return True

            def world_size(self) -> int:
                return place.world

            def global_rank(self) -> int:
                return place.rank

            def local_rank(self) -> int:
                return place.rank

        model = build_model(job)
        strategy = DDPStrategy(cluster_environment=Joined(), process_group_backend="gloo", broadcast_buffers=False)
        fabric = Fabric(accelerator="cpu", devices=place.world, strategy=strategy)
        fabric.launch()
        forward, optimizer = fabric.setup(model, optimizer_of(job, model.named_parameters()))
        trainee = InFabric(job, place, model, forward, optimizer)
        trainee.fabric = fabric
        return trainee


ADAPTER = Lightning
