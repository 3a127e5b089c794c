"""Memory of a host whose ranks share parameters and gradients, beside DDP: all ranks together.

Two figures. What is held between steps: parameters, gradients, moments and DDP's buckets, with what ranks share counted
once. And the highest sum over ranks of what the kernel calls their proportional size, in which a shared page counts
once, sampled during steps. DDP keeps its buckets beside the gradients, unless told gradient_as_bucket_view.

    dp(P, via=shared())         4 + 4 ceil(P/2) + 8
    DDP                         P (4 + 4 + 4 + 8)
    DDP, gradients in buckets   P (4 + 4 + 8)
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memory import BLOCKS, HEADS, RETURNING, WIDTH, job_of, tensor_bytes

DDP, LEAN = "DDP", "DDP, gradients in buckets"
SAMPLED_EVERY_S = 0.002


class Contestant:
    """Something that trains, and what of its tensors `tensor_bytes` does not see, or sees once for each rank."""

    shared_bytes = 0
    hidden_bytes = 0

    def __init__(self, name: str, me: Any, width: int, blocks: int) -> None:
        import torch.distributed as dist
        from peers.frameworks import Framework

        from shoal.comparison.adapters.torch_ddp import TorchDDP
        from shoal.runtime.setup import prepare
        from shoal.strategy import parse

        self.me, self.job, self.number = me, job_of(me.world, width, blocks), 0
        self.ready, self.ddp = None, None
        if name in (DDP, LEAN):
            plain = dist.new_group(backend="gloo")
            self.ddp = Framework(TorchDDP(gradient_as_bucket_view=name == LEAN), self.job, me, plain)
        else:
            self.ready = prepare(self.job, parse(name), rank=me.rank, backend=me.backend)
        for _ in range(3):
            self.step()
        if self.ready is not None:
            memories = [(bucket.buffer, bucket.memory) for bucket in self.ready.engine.buckets]
            # What lies in shared memory counts once; that much of a block as is in use.
            self.hidden_bytes = -sum(buffer.values.untyped_storage().nbytes() for buffer, _ in memories)
            self.shared_bytes = sum(buffer.bytes * (1 + len(memory.in_use)) for buffer, memory in memories)
            self.parameters = sum(buffer.numel for buffer, _ in memories)
        else:
            parameters = list(self.ddp.trainee.model.parameters())
            self.gradients = [param.grad for param in parameters]
            self.parameters = sum(param.numel() for param in parameters)
            if name == DDP:
                self.hidden_bytes = 4 * self.parameters

    def step(self) -> None:
        if self.ready is not None:
            self.ready.runner.step(0, self.number * self.me.world)
        else:
            self.gradients = []
            self.ddp.step(0)
        self.number += 1


def proportional(processes: list[int]) -> int:
    """Bytes in memory of all processes together: a page that several map is divided among them."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


@contextmanager
def watched(processes: list[int], highest: list[int]) -> Iterator[None]:
    """Samples the processes' size while it lasts; the highest goes to the end of the list."""
    over = threading.Event()

    def watch() -> None:
        most = 0
        while not over.is_set():
            most = max(most, proportional(processes))
            time.sleep(SAMPLED_EVERY_S)
        highest.append(most)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def of_host(settings: dict[str, Any], channel: Any) -> dict[str, float]:
    """On every rank: its tensors between two steps and what is shared; on the first also the peak of all ranks."""
    from shoal.comm.json_exchange import exchange
    from shoal.launch.join import join, leave

    me = join()
    processes = [row["process"] for row in exchange({"process": os.getpid()})]
    small = Contestant(settings["name"], me, HEADS * 8, 2)
    if small.ready is not None:
        small.ready.engine.close()
    del small
    gc.collect()
    exchange({})
    before, before_tensors = proportional(processes), tensor_bytes()
    exchange({})
    big = Contestant(settings["name"], me, WIDTH, BLOCKS)
    gc.collect()
    private = tensor_bytes() - before_tensors + big.hidden_bytes
    highest: list[int] = []
    # One rank looks at all, so that the sum is of one moment.
    with watched(processes if me.rank == 0 else [], highest):
        for _ in range(4):
            big.step()
        exchange({})
    leave()
    return {
        "private": private,
        "shared": big.shared_bytes,
        "peak": highest[0] - before,
        "parameters": big.parameters,
    }


def host_formula(name: str, ranks: int) -> float:
    """Bytes per parameter on the host, float32 and AdamW."""
    return {DDP: 20.0 * ranks, LEAN: 16.0 * ranks}.get(name, 12.0 + 4.0 * -(-ranks // 2))


def host_rows(ranks: int) -> list[dict[str, Any]]:
    from shoal.launch import run_ranks

    rows: list[dict[str, Any]] = []
    for name in (DDP, LEAN, f"dp({ranks}, via=shared())"):
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = run_ranks("_host_memory:of_host", {"name": name}, ranks=ranks, environment=RETURNING)
        parameters = found[0]["parameters"]
        held = found[0]["shared"] + sum(rank["private"] for rank in found)
        rows.append(
            {
                "name": name,
                "formula_bytes_per_parameter": host_formula(name, ranks),
                "held_between_steps": round(held / parameters, 2),
                "peak_bytes_per_parameter": round(found[0]["peak"] / parameters, 2),
            }
        )
    lean = rows[1]
    for row in rows:
        row["held_of_ddp"] = round(row["held_between_steps"] / lean["held_between_steps"], 3)
        row["peak_of_ddp"] = round(row["peak_bytes_per_parameter"] / lean["peak_bytes_per_parameter"], 3)
    return rows
