"""DistributedDataParallel with `ZeroRedundancyOptimizer`: each rank keeps the optimiser state of some parameters,
updates those, and broadcasts them.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shoal.comparison.adapter import Adapter, RankPlace, Replica, Trainee, optimizer_of
from shoal.job import Job
from shoal.runtime.step import build_model


class Zero1(Adapter):
    title = "PyTorch DDP, ZeroRedundancyOptimizer"
    same_as = "dp({n}, zero=1)"

    def build(self, job: Job, place: RankPlace) -> Trainee:
        model = build_model(job)
        forward = DistributedDataParallel(model, process_group=place.group, broadcast_buffers=False)
        made: Any = optimizer_of(job, model.named_parameters())
        taken = inspect.signature(type(made)).parameters
        defaults = {name: value for name, value in made.defaults.items() if name in taken}
        groups = [
            {name: value for name, value in group.items() if name == "params" or name in taken}
            for group in made.param_groups
        ]
        optimizer = ZeroRedundancyOptimizer(groups, type(made), process_group=place.group, **defaults)
        return Replica(job, place, model, forward, optimizer)


ADAPTER = Zero1
