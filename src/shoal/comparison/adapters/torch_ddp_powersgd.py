"""DistributedDataParallel with PyTorch's PowerSGD hook: gradients of rank 4, with error feedback and a warm start.

The hook sends from callbacks, whose order Gloo leaves open: with several buckets under way ranks lose step with each
other. So all gradients are one bucket.
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.comparison.adapter import RankPlace
from shoal.comparison.adapters.torch_ddp import TorchDDP
from shoal.job import Job

RANK = 4
ONE_BUCKET_MB = 1024
FIRST_COMPRESSED_STEP = 2
"""The least that error feedback with a warm start allows; steps before it are dense."""


class PowerSGD(TorchDDP):
    exact = False

    def __init__(self, rank: int = RANK) -> None:
        super().__init__(bucket_cap_mb=ONE_BUCKET_MB)
        self.rank = rank
        self.title = f"PyTorch DDP, PowerSGD of rank {rank}"
        self.same_as = f"dp({{n}}, compress=powersgd({rank}))"

    def configure(self, model: DistributedDataParallel, job: Job, place: RankPlace) -> None:
        state = PowerSGDState(
            place.group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=FIRST_COMPRESSED_STEP,
            random_seed=job.seed,
        )
        model.register_comm_hook(state, powerSGD_hook)


ADAPTER = PowerSGD
