"""Every rank tells every other a small JSON object: how ranks agree on what went well and what did not.

PyTorch's own exchange of objects pickles them. Nothing that comes over the network is unpickled here: the
objects travel as bytes in tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.mesh import Members


def world_and_rank() -> tuple[int, int]:
    """How many ranks there are and which one this is; (1, 0) where nothing is distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def exchange(report: Mapping[str, Any], over: Members | None = None) -> list[dict[str, Any]]:
    """What every rank of the world, or of `over`, reports, in the order of ranks. Collective: nobody leaves before all
    have come."""
    text = json.dumps(report, allow_nan=False).encode()
    world, group = (world_and_rank()[0], None) if over is None else (over.size, over.group)
    if world == 1:
        return [json.loads(text)]
    device = _device()
    sizes = torch.empty(world, dtype=torch.int64, device=device)
    dist.all_gather_single(sizes, torch.tensor([len(text)], device=device), group=group)
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    everyones = torch.empty(world, mine.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_single(everyones.view(-1), mine, group=group)
    rows = everyones.cpu().numpy()
    return [json.loads(rows[rank, :size].tobytes()) for rank, size in enumerate(sizes.tolist())]


def _device() -> torch.device:
    """Where the world's group carries tensors from: host memory, if it can."""
    kinds = [device.type for device in dist.distributed_c10d._get_default_group()._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
