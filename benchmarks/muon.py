"""What sharing the update saves: processor time of Muon and AdamW on two replicas, with and without ZeRO.

    python benchmarks/muon.py [--quick]

Under dp(2) both ranks update every matrix; under dp(2, zero=1) each updates half of them and they exchange the results.
Both engines live in the same processes and step in turn; the figures are the median processor time of a rank's update,
which other programs on the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

STRATEGIES = ("dp(2)", "dp(2, zero=1)")


def measure(given: dict[str, Any], channel: Any) -> dict[str, float]:
    """On a rank: (optimiser, strategy) -> median milliseconds of an update."""
    from shoal.job import MuonWithAdamW, load_job
    from shoal.launch.join import join, leave
    from shoal.runtime.setup import prepare
    from shoal.strategy import parse

    def hidden(name: str, param: torch.Tensor) -> dict[str, Any]:
        return {"muon": param.dim() == 2 and "blocks" in name}

    me, ready, took = join(), {}, {}
    task = replace(load_job("language", size=given["size"]), global_batch=2)
    jobs = {
        "Muon": replace(task, optimizer=partial(MuonWithAdamW, lr=1e-3), options=hidden),
        "AdamW": replace(task, optimizer=partial(torch.optim.AdamW, lr=1e-3), options=lambda name, param: {}),
    }
    for name, job in jobs.items():
        for strategy in STRATEGIES:
            label = f"{name} {strategy}"
            ready[label] = prepare(job, parse(strategy), rank=me.rank, backend=me.backend)
            took[label] = [0.0]
            _timed(ready[label].engine.owner, took[label])
    for step in range(given["steps"]):
        for each in ready.values():
            each.runner.step(step, 0)
    for each in ready.values():
        each.close()
    leave()
    return {label: 1000 * statistics.median(times[2:]) for label, times in took.items()}


def _timed(owner: Any, times: list[float]) -> None:
    update = owner.update

    def timed(*args: Any, **kwargs: Any) -> None:
        before = time.process_time()
        update(*args, **kwargs)
        times.append(time.process_time() - before)

    owner.update = timed


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--quick", action="store_true", help="the tiny model, few steps")
    quick = asked.parse_args().quick
    sys.path.insert(0, str(Path(__file__).parent))
    from shoal.launch import run_ranks

    settings = {"size": "tiny" if quick else "small", "steps": 4 if quick else 8}
    rows = run_ranks("muon:measure", settings, ranks=2)
    for label in rows[0]:
        print(f"{label:<22} " + "  ".join(f"rank {rank}: {row[label]:8.1f} ms" for rank, row in enumerate(rows)))


if __name__ == "__main__":
    main()
