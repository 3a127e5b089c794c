"""What ranks run in the tests of offload."""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from distributed.jobs.offloaded import job_of
from shoal.checkpoint.save import save
from shoal.job import Job
from shoal.launch.join import join, leave
from shoal.parallel.offload.offloading import give_back_freed_memory
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse


def large(**changes: Any) -> Job:
    """11 million parameters: 42 MB, and 84 MB of AdamW's state."""
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-3)
    return job_of(**({"width": 512, "depth": 10, "batch": 64, "optimizer": optimizer} | changes))


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(f"{key}:"))


def begin_peak() -> None:
    """From here on VmHWM is the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def train_measured(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Some steps, the peak of resident memory from the building of the model on, and what was offloaded.
    `more_bytes`: what the process may hold besides what it holds once it is ready to train."""
    me = join()
    give_back_freed_memory()  # Also where nothing is offloaded: what is compared is what tensors need.
    job = large(**arguments.get("changes", {}))
    before = status("VmRSS")
    begin_peak()
    ready = prepare(job, parse(arguments["strategy"]), rank=me.rank, backend=me.backend, device=me.device)
    if "more_bytes" in arguments:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + arguments["more_bytes"],) * 2)
    losses, times = [], []
    for step, counter in _turns(ready, arguments.get("steps", 4)):
        started = time.perf_counter()
        losses.append(ready.runner.step(step, counter).loss)
        times.append(time.perf_counter() - started)
    ready.engine.optimizer.settle()
    if "save" in arguments:
        save(Path(arguments["save"]), ready.engine, step=len(losses), progress={})
    found = {
        "peak_bytes": status("VmHWM") - before,
        "losses": losses,
        "step_s": statistics.median(times[1:]),
        "offload": ready.engine.owner.offloading.report(),
        "state_bytes": sum(piece.values.numel() * 4 for _, piece in ready.engine.owner.state()),
    }
    if ready.engine.activations is not None:
        found["activations"] = ready.engine.activations.most_bytes
    leave()
    return found


def _turns(ready: Prepared, steps: int) -> Any:
    counter = 0
    for step in range(steps):
        yield step, counter
        counter = ready.runner.order.next(counter)
