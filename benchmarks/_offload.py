"""What the ranks of `offload.py` run."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.job import Job, TensorData
from shoal.launch.join import join, leave
from shoal.parallel.offload.level import DiskLevel
from shoal.parallel.offload.offloading import give_back_freed_memory
from shoal.runtime.setup import prepare
from shoal.strategy import parse


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, batch["y"], reduction="sum"), len(output)


def job(width: int, depth: int, batch: int) -> Job:
    x = torch.randn(2 * batch, width, generator=torch.Generator().manual_seed(3))
    return Job(
        name="offload",
        model=lambda: nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 8)),
        train=TensorData(x=x, y=x[:, :8].argmax(1)),
        loss=loss_of,
        global_batch=batch,
        steps=1000,
        clip=1.0,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4),
    )


def status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(f"{key}:"))


def measure(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Peak memory, step time, and the time of forward, backward and update, of one strategy."""
    DiskLevel.past_cache = arguments["past_cache"]
    me = join()
    give_back_freed_memory()  # Everywhere alike: what is compared is what tensors need.
    what = job(**arguments["sizes"])
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    ready = prepare(what, parse(arguments["strategy"]), rank=me.rank, backend=me.backend, device=me.device)
    engine, owner, spent = ready.engine, ready.engine.owner, {"update": 0.0, "backward": 0.0}

    def timed(name: str, call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            found = call(*given, **named)
            spent[name] = time.perf_counter() - started
            return found

        return run

    owner.update = timed("update", owner.update)
    engine.run_backward = timed("backward", engine.run_backward)
    rows, counter = [], 0
    for step in range(arguments["steps"]):
        started = time.perf_counter()
        ready.runner.step(step, counter)
        rows.append((time.perf_counter() - started, spent["backward"], spent["update"]))
        counter = ready.runner.order.next(counter)
    engine.optimizer.settle()
    step_s, backward_s, update_s = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    found = {
        "peak_bytes": status("VmHWM") - before,
        "step_s": step_s,
        "backward_s": backward_s,
        "update_s": update_s,
        "offload": owner.offloading.report(),
        "parameters": sum(bucket.buffer.numel for bucket in engine.buckets),
        "activation_bytes": engine.activations.most_bytes if engine.activations is not None else 0,
    }
    leave()
    return found


def throughput(arguments: dict[str, Any], channel: Any) -> dict[str, float]:
    """Bytes a second of the level below, in ranges of a megabyte."""
    DiskLevel.past_cache = arguments["past_cache"]
    level, size, times = DiskLevel(), 1 << 20, 192
    place = level.reserve(size * times, mapped=False)
    buffer = torch.ones(size, dtype=torch.uint8)
    found = {}
    for number in range(times):
        place.write(number * size, buffer).wait()  # The first write to a range also takes it from the disk's free ones.
    for name, move in (("write", place.write), ("read", place.read)):
        started = time.perf_counter()
        for number in range(times):
            move(number * size, buffer).wait()
        found[name] = size * times / (time.perf_counter() - started)
    level.close()
    return found
