"""Steps per second of each axis at two ranks, beside hand-written PyTorch and beside the limit.

Every contestant of an axis trains the same job on the same two ranks, a step or two in turn, round after round, so that
whatever the machine does meets all of them. Before anything is timed, the losses of their first steps must agree to
1e-4. The limit is a rank's own work without any communication (`benchmarks/peers/` says what that is for each axis).

Two cases more: stages of equal cost beside stages of equal numbers of pieces, on a model whose work is uneven; and the
bubble of 1F1B, measured as the time in which ranks wait, beside its formula.

    python benchmarks/parallel.py [--only tensor,pipeline] [--rounds 12] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import add_ratio, arguments, report

CASES = ("tensor", "pipeline", "context", "experts", "stages", "bubble")
AGREE = 1e-4
MICRO = (2, 4, 8)


def contest(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: seconds per step of every contestant, a list over rounds (the slower rank counts)."""
    import torch
    import torch.distributed as dist

    from shoal.launch.join import join, leave

    me = join()
    plain = dist.new_group(backend="gloo")

    def largest(value: float) -> float:
        mine = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=plain)
        return float(mine)

    steps, losses = {}, {}
    for name, build in _contestants(settings, me, plain).items():
        steps[name] = build()
        told = [steps[name]() for _ in range(3)]
        losses[name] = [largest(float("-inf") if loss is None else loss) for loss in told]
        if me.rank == 0:
            channel.say({"doing": f"warming up: {name}"})
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(settings["rounds"]):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier(group=plain)
            start = time.perf_counter()
            for _ in range(settings["steps"]):
                steps[name]()
            times[name].append(largest((time.perf_counter() - start) / settings["steps"]))
        if me.rank == 0:
            channel.say({"doing": f"round {turn + 1} of {settings['rounds']}"})
    leave()
    known = {name: told for name, told in losses.items() if min(told) > float("-inf")}
    return {"times": times, "losses": known}


def _contestants(settings: dict[str, Any], me: Any, plain: Any) -> dict[str, Any]:
    from peers import context, experts, pipeline, tensor
    from peers.common import gpt_job

    size, quick = settings["size"], settings["size"] == "tiny"
    if settings["case"] == "tensor":
        return tensor.contestants(gpt_job(size, batch=16), me, plain)
    if settings["case"] == "pipeline":
        return pipeline.contestants(gpt_job(size, batch=16, layers=4), me, plain)
    if settings["case"] == "context":
        # Long enough for attention to count: at 128 positions it is a thirtieth of a block's work.
        return context.contestants(gpt_job(size, batch=4, sequence=64 if quick else 512), me, plain)
    if settings["case"] == "experts":
        return experts.contestants(experts.mixture_job(gpt_job(size, batch=16)), me, plain)
    return pipeline.stage_contestants(size, 16, me)


def measure_bubble(settings: dict[str, Any], channel: Any) -> dict[str, dict[str, float]]:
    import torch.distributed as dist
    from peers.common import gpt_job
    from peers.pipeline import bubble

    from shoal.launch.join import join, leave

    me = join()
    plain = dist.new_group(backend="gloo")
    found = {}
    for micro in MICRO:
        # Micro-batches of one size, so that only their number changes.
        job = gpt_job(settings["size"], batch=2 * micro, layers=4)
        found[str(micro)] = bubble(job, micro, me, plain, steps=settings["rounds"])
        if me.rank == 0:
            channel.say({"doing": f"{micro} micro-batches"})
    leave()
    return found


def _peers(case: str) -> dict[str, str]:
    from peers import context, experts, pipeline, tensor

    if case == "stages":
        return {pipeline.BALANCED: pipeline.EQUAL}
    return {"tensor": tensor, "pipeline": pipeline, "context": context, "experts": experts}[case].PEERS


def require_agreement(losses: dict[str, list[float]], peers: dict[str, str]) -> None:
    """A peer that trains something else would be no peer."""
    for name, peer in peers.items():
        if peer not in losses or name not in losses:
            raise RuntimeError(f"{peer if peer not in losses else name} told no loss, so it cannot be compared")
        for step, (mine, other) in enumerate(zip(losses[name], losses[peer], strict=True)):
            if not abs(mine - other) <= AGREE:
                raise RuntimeError(
                    f"step {step}: {name} has a loss of {mine}, {peer} of {other}; they train differently"
                )


def rows_of(found: dict[str, Any], peers: dict[str, str]) -> list[dict[str, Any]]:
    from peers.common import LIMIT

    times = found["times"]
    rows = []
    for name in times:
        row: dict[str, Any] = {"name": name, "step_ms": round(1000 * sorted(times[name])[len(times[name]) // 2], 1)}
        if LIMIT in times:
            add_ratio(row, "of_limit", times[name], times[LIMIT])
        if name in peers:
            row["peer"] = peers[name]
            add_ratio(row, "of_peer", times[name], times[peers[name]])
        rows.append(row)
    return rows


def bubble_rows(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"pp(2, '1f1b', micro={micro})",
            "step_without_update_ms": round(1000 * row["makespan_s"], 1),
            "idle_ms": round(1000 * row["idle_s"], 1),
            "bubble": round(row["idle_s"] / row["makespan_s"], 4),
            "formula": round(1 / (int(micro) + 1), 4),
        }
        for micro, row in found.items()
    ]


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default=",".join(CASES), help=f"some of {', '.join(CASES)}, with commas between")
        parser.add_argument("--rounds", type=int, default=12)
        parser.add_argument("--steps", type=int, default=2, help="steps of each contestant in a round")
        parser.add_argument("--quick", action="store_true", help="a tiny model: shows that all cases run, nothing else")

    asked = arguments(__doc__ or "", extend)
    from shoal.launch import run_ranks

    cases = asked.only.split(",")
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        sys.exit(f"--only {unknown[0]}: there is no such case; there are {', '.join(CASES)}")

    def told(rank: int, message: dict[str, Any]) -> None:
        print(f"\r{case}: {message['doing']:<70}", end="", file=sys.stderr, flush=True)

    written = {}
    for case in cases:
        settings = {
            "case": case,
            "size": "tiny" if asked.quick else "small",
            "rounds": asked.rounds,
            "steps": asked.steps,
        }
        target = "parallel:measure_bubble" if case == "bubble" else "parallel:contest"
        found = run_ranks(target, settings, ranks=2, on_message=told)[0]
        print(file=sys.stderr)
        if case == "bubble":
            rows = bubble_rows(found)
        else:
            require_agreement(found["losses"], _peers(case))
            rows = rows_of(found, _peers(case))
        written[case] = rows
        if not asked.json:
            report(rows, title=f"{case}: two ranks, {asked.rounds} rounds", as_json=False)
    if asked.json:
        print(json.dumps(written))


if __name__ == "__main__":
    main()
