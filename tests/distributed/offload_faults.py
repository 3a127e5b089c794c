"""Faults of offload, planted on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.parallel.offload.level import DiskLevel, LowerRange, Moving
from shoal.proof.entry import parallel_run


class _Nothing(Moving):
    def wait(self) -> None:
        pass


def _faulty(fault: Callable[[int], bool], arguments: dict[str, Any], channel: Any) -> Any:
    """Writes for which `fault` is true do not arrive."""
    write, times = DiskLevel.write, {"calls": 0}

    def faulty(self: DiskLevel, place: LowerRange, offset: int, values: torch.Tensor) -> Moving:
        times["calls"] += 1
        return _Nothing() if fault(times["calls"]) else write(self, place, offset, values)

    DiskLevel.write = faulty
    return parallel_run(arguments, channel)


def one_part_not_written_back(arguments: dict[str, Any], channel: Any) -> Any:
    """In the second step one range of the state stays as it was (the first makes a write for each of 57 tensors)."""
    return _faulty(lambda call: call == 60, arguments, channel)


def never_written_back(arguments: dict[str, Any], channel: Any) -> Any:
    return _faulty(lambda call: call > 100, arguments, channel)
