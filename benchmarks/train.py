"""Steps per second of Shoal's data parallelism beside PyTorch's (the adapters of `shoal compare`) and beside the limit.

Every contestant trains the same job on the same two ranks, a few steps in turn, round after round, so that whatever
the machine does meets all of them. The limit is the same ranks with the same work and no communication at all.

    python benchmarks/train.py [--job language:small] [--batch 16] [--rounds 12] [--json]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import add_ratio, arguments, report

PEERS = {
    "dp(2, via=shared())": "one process, two threads",
    "dp(2)": "DDP",
    "dp(2, zero=1)": "DDP + ZeroRedundancyOptimizer",
    "dp(2, zero=2)": "fully_shard, kept after forward",
    "dp(2, zero=3)": "fully_shard",
}
LIMIT = "no communication"


def contest(settings: dict[str, Any], channel: Any) -> dict[str, list[float]]:
    """On every rank: seconds per step of every contestant, a list over rounds (the slower rank counts)."""
    import torch
    import torch.distributed as dist

    from shoal.launch.join import join, leave

    me = join()
    plain = dist.new_group(backend="gloo")
    contestants = _contestants(settings, me, plain)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for name, step in contestants.items():
        for _ in range(3):
            step()
        if me.rank == 0:
            channel.say({"event": "warm", "name": name})
    names = list(contestants)
    for turn in range(settings["rounds"]):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier(group=plain)
            start = time.perf_counter()
            for _ in range(settings["steps"]):
                contestants[name]()
            mine = torch.tensor([(time.perf_counter() - start) / settings["steps"]])
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=plain)
            times[name].append(float(mine))
        if me.rank == 0:
            channel.say({"event": "round", "round": turn + 1})
    leave()
    return times


def _contestants(settings: dict[str, Any], me: Any, plain: Any) -> dict[str, Any]:
    import torch
    from peers.frameworks import stepper

    from shoal.comparison.adapters.torch_ddp import TorchDDP
    from shoal.comparison.adapters.torch_fsdp2 import FSDP2
    from shoal.comparison.adapters.torch_zero1 import Zero1
    from shoal.job import load_job, param_groups, share
    from shoal.runtime.setup import prepare
    from shoal.runtime.step import build_model
    from shoal.strategy import parse

    job = replace(load_job(settings["job"]), global_batch=settings["batch"])
    order = job.order()

    def plain_step(model: Any, optimizer: Any) -> Any:
        """The mean loss of the rank's share, backward, clip, step, and nothing sent."""
        state = {"counter": 0}

        def step() -> None:
            indices = order.indices(state["counter"])
            batch = job.train.batch(share(indices, rank=me.rank, ranks=me.world))
            loss, count = job.loss(job.run_model(model, batch), batch)
            optimizer.zero_grad(set_to_none=True)
            (loss / count).backward()
            if job.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            state["counter"] = order.next(state["counter"])

        return step

    def groups(model: Any) -> list[dict[str, Any]]:
        return param_groups(model, job.options)

    def two_threads(model: Any, optimizer: Any) -> Any:
        """One process on the whole batch with both cores, while the other rank sleeps."""
        state = {"counter": 0}

        def step() -> None:
            if me.rank:
                return
            torch.set_num_threads(2)
            batch = job.train.batch(order.indices(state["counter"]))
            loss, count = job.loss(job.run_model(model, batch), batch)
            optimizer.zero_grad(set_to_none=True)
            (loss / count).backward()
            if job.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            state["counter"] = order.next(state["counter"])
            torch.set_num_threads(1)

        return step

    found: dict[str, Any] = {}
    both = build_model(job)
    found["one process, two threads"] = two_threads(both, job.optimizer(groups(both)))
    alone = build_model(job)
    found[LIMIT] = plain_step(alone, job.optimizer(groups(alone)))
    for name, adapter in (
        ("DDP", TorchDDP()),
        ("DDP + ZeroRedundancyOptimizer", Zero1()),
        ("fully_shard", FSDP2()),
        ("fully_shard, kept after forward", FSDP2(reshard_after_forward=False)),
    ):
        found[name] = stepper(adapter, job, me, plain)
    for text in PEERS:
        runner = prepare(job, parse(text), rank=me.rank, backend=me.backend).runner

        def step(runner: Any = runner, state: dict[str, int] = {"n": 0, "counter": 0}) -> None:  # noqa: B006
            runner.step(state["n"] % job.steps, state["counter"])
            state["counter"] = order.next(state["counter"])

        found[text] = step
    return found


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--job", default="language:small")
        parser.add_argument("--batch", type=int, default=16, help="global batch: small, so that communication shows")
        parser.add_argument("--rounds", type=int, default=12)
        parser.add_argument("--steps", type=int, default=2, help="steps of each contestant in a round")

    asked = arguments(__doc__ or "", extend)
    from shoal.launch import run_ranks

    settings = {"job": asked.job, "batch": asked.batch, "rounds": asked.rounds, "steps": asked.steps}

    def told(rank: int, message: dict[str, Any]) -> None:
        doing = (
            f"round {message['round']} of {asked.rounds}" if "round" in message else f"warming up: {message['name']}"
        )
        print(f"\r{doing:<60}", end="", file=sys.stderr, flush=True)

    times = run_ranks("train:contest", settings, ranks=2, on_message=told)[0]
    print(file=sys.stderr)
    rows = []
    for name in [LIMIT, *dict.fromkeys(PEERS.values()), *PEERS]:
        row: dict[str, Any] = {"name": name, "step_ms": round(1000 * sorted(times[name])[len(times[name]) // 2], 1)}
        add_ratio(row, "of_limit", times[name], times[LIMIT])
        if name in PEERS:
            row["peer"] = PEERS[name]
            add_ratio(row, "of_peer", times[name], times[PEERS[name]])
        rows.append(row)
    report(rows, title=f"{asked.job}, global batch {asked.batch}, two ranks, {asked.rounds} rounds", as_json=asked.json)


if __name__ == "__main__":
    main()
