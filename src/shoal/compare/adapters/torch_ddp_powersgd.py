"""DistributedDataParallel with PyTorch's PowerSGD hook: gradients of rank 4, with error feedback and a warm start."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.compare.adapter import Place
from shoal.compare.adapters.torch_ddp import TorchDDP

RANK = 4
FIRST_COMPRESSED_STEP = 2
"""The least that error feedback with a warm start allows; steps before it are dense."""


class PowerSGD(TorchDDP):
    title = "PyTorch DDP, PowerSGD of rank 4"
    same_as = "dp({n}, compress=powersgd(4))"
    exact = False

    def configure(self, model: DistributedDataParallel, place: Place) -> None:
        state = PowerSGDState(place.group, matrix_approximation_rank=RANK, start_powerSGD_iter=FIRST_COMPRESSED_STEP)
        model.register_comm_hook(state, powerSGD_hook)


ADAPTER = PowerSGD
