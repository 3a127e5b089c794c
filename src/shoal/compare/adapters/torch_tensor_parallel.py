"""Tensor parallelism by DTensor: PyTorch has no plan of its own for a model, so the roles of the projections are those
that Shoal's layout found, written as `parallelize_module` wants them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.compare.adapter import Adapter, Place, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.job.facts import build_without_memory
from shoal.layout.layout import layout_of
from shoal.runtime.step import build_model
from shoal.strategy import parse


class TensorReplica(Replica):
    """Every rank computes the whole batch."""

    def step(self, counter: int, lr_factor: float) -> None:
        for optimizer, rates in self.optimizers:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * lr_factor
            optimizer.zero_grad(set_to_none=True)
        batch = self.job.train.batch(self.order.indices(counter))
        total, count = self.job.loss_of(self.job.run_model(self.model, batch), batch)
        (total / count).backward()
        if self.job.clip is not None:
            kinds = [[p.grad for p in kind if p.grad is not None] for kind in self.kinds]
            norms = [nn.utils.get_total_norm(kind) for kind in kinds if kind]
            full = [float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) for norm in norms]
            scale = min(1.0, self.job.clip / (sum(norm**2 for norm in full) ** 0.5 + 1e-6))
            for gradient in (each for kind in kinds for each in kind):
                gradient.mul_(scale)
        for optimizer, _ in self.optimizers:
            optimizer.step()

    def prepare(self) -> TensorReplica:
        named = list(self.model.named_parameters())
        cut = [(name, each) for name, each in named if hasattr(each, "full_tensor")]
        full = [(name, each) for name, each in named if not hasattr(each, "full_tensor")]
        self.kinds = [[each for _, each in kind] for kind in (cut, full)]
        # DTensors and tensors cannot be mixed in one call of an optimiser.
        made = [optimizer_of(self.job, kind) for kind in (cut, full) if kind]
        self.optimizers: list[Any] = [(each, [group["lr"] for group in each.param_groups]) for each in made]
        return self


class TensorParallel(Adapter):
    title = "PyTorch DTensor tensor parallelism"
    same_as = "tp({n})"

    def refuses(self, job: Job, world: int) -> str:
        if world == 1:
            return "one rank has nothing to split"
        return "" if _plan(job, build_without_memory(job), world) else "no pair of linear layers can be split as it is"

    def build(self, job: Job, place: Place) -> Trainee:
        model = build_model(job)
        plan = _plan(job, model, place.world)
        parallelize_module(model, DeviceMesh.from_group(place.group, "cpu", mesh_dim_names=("tp",)), plan)
        optimizer = optimizer_of(job, model.named_parameters())
        return TensorReplica(job, place, model, model, optimizer).prepare()


def _plan(job: Job, model: nn.Module, world: int) -> dict[str, Any]:
    """Column- and row-parallel linear layers of the regions that can be split as they are."""
    layout = layout_of(job, parse(f"tp({world})"))
    modules, plan = dict(model.named_modules()), dict[str, Any]()
    for region in layout.tensor.regions if layout.tensor is not None else ():
        linear = all(isinstance(modules[path], nn.Linear) for path in (*region.columns, *region.rows))
        if not linear or region.parts % world or region.scaled or any(view.places for view in region.views):
            continue
        plan |= {path: ColwiseParallel() for path in region.columns}
        plan |= {path: RowwiseParallel() for path in region.rows}
    return plan


ADAPTER = TensorParallel
