"""What is timed over a real slow link and over an emulated one: collectives of two ranks, and steps of dp(2).

A function for `ranks`, and a module for torchrun: `python -m distributed.link_targets '{"into": FILE, ...}'`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.job.models.gpt import GPT, GPTConfig
from shoal.job.tasks.language import language
from shoal.launch.join import join, leave
from shoal.runtime.setup import prepare
from shoal.strategy import parse

SIZES_BYTES = (1_000_000, 4_000_000)
"""The smaller takes 8 ms at 1 Gb/s: there bandwidth counts, and what waking up costs hardly."""


def times_over_link(arguments: dict[str, Any], channel: Any) -> dict[str, float]:
    """Milliseconds of each collective and of a training step for the slower rank. The best of a few, since a busy
    machine makes any of them longer and none shorter."""
    me = join(backend="shoal", emulate=arguments.get("emulate"))
    group = dist.new_group(backend="shoal")
    calls: dict[str, Callable[[], Any]] = {}
    for size in SIZES_BYTES:
        calls[f"all_reduce {size}"] = partial(dist.all_reduce, torch.ones(size // 4), group=group)
        whole, part = torch.ones(size // 2), torch.ones(size // 4)
        calls[f"all_gather {size}"] = partial(dist.all_gather_single, whole, part, group=group)
    calls["dp(2)"] = _training(me)
    found = {name: _best_ms(call, group, arguments["repeats"]) for name, call in calls.items()}
    leave()
    return found


def _training(me: Any) -> Callable[[], Any]:
    """A model of some 2 MB, so that its gradient takes longer than its arithmetic at 100 Mb/s."""
    config = GPTConfig(layers=3, heads=4, hidden=128, sequence=32)
    job = replace(language("tiny"), model=partial(GPT, config), global_batch=8)
    runner = prepare(job, parse("dp(2)"), rank=me.rank, backend=me.backend).runner
    return lambda: runner.step(0, 0)


def _best_ms(call: Callable[[], Any], group: Any, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier(group=group)
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    slower = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(slower, op=dist.ReduceOp.MAX, group=group)
    return 1000 * float(slower.min())


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    measured = times_over_link(given, None)
    if os.environ["RANK"] == "0":
        Path(given["into"]).write_text(json.dumps(measured))
