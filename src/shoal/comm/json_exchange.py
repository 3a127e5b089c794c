"""All-gathers a small JSON object from every rank: how ranks agree on success or failure.

PyTorch's own object collectives use pickle. Nothing from the network is unpickled here: the objects are sent as
bytes in tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.mesh import Members

_trainers: Members | None = None


def only_among(trainers: Members | None) -> None:
    """From now on the ranks that train are these; None: all ranks. Parameter servers have ranks of their own."""
    global _trainers
    _trainers = trainers


def world_and_rank() -> tuple[int, int]:
    """(number of ranks that train, this rank); (1, 0) if torch.distributed is not initialised."""
    if _trainers is not None:
        return _trainers.size, _trainers.index
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def exchange(report: Mapping[str, Any], over: Members | None = None) -> list[dict[str, Any]]:
    """The reports of all ranks of the world, or of `over`, in rank order. Collective; also a barrier."""
    text = json.dumps(report, allow_nan=False).encode()
    over = over or _trainers
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
    """The device of tensors that the world's group can send: host memory if possible."""
    kinds = [device.type for device in dist.distributed_c10d._get_default_group()._device_types]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
