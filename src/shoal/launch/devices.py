"""The accelerators that one rank finds on its host, as it reports them to the others.

Devices are found through `torch.accelerator`, so any that PyTorch has collectives for will do. A rank computes on the
device whose number is its place on the host.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.comm.group import accelerator_backend


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesHere:
    """What a rank reports."""

    kind: str | None
    """As in `torch.device`; None without an accelerator."""
    backend: str | None
    """The backend that carries its tensors."""
    count: int
    local_rank: int

    @property
    def has_own(self) -> bool:
        return self.local_rank < self.count


def devices_here(local_rank: int) -> DevicesHere:
    """What this process sees. On some accelerators it may not fork afterwards."""
    found = accelerator_backend()
    if found is None or not torch.accelerator.is_available():
        return DevicesHere(kind=None, backend=None, count=0, local_rank=local_rank)
    name, device = found
    return DevicesHere(kind=device.type, backend=name, count=torch.accelerator.device_count(), local_rank=local_rank)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held at a time: on its accelerator, or in host memory where it has none."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated(device)


def memory_limit_bytes() -> int:
    """What processes here may hold together: the host's memory, or less where they are held to less."""
    total = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemTotal:"):
                total = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):
        held = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        total = min(total, int(held)) if held.isdigit() else total
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        total = min(total, soft) if soft != resource.RLIM_INFINITY else total
    return total
