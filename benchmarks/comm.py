"""Collectives of two ranks beside plain Gloo's and beside a copy in memory, interleaved in one run.

Every contestant does the same collective on the same tensors, round after round, so that whatever the machine does
meets all of them. The first call of each turn is not timed: the barrier before it lets ranks go up to a millisecond
apart, which is no contestant's time. The limit is a plain copy of the same bytes. `--backend gloo` measures the
counting group around Gloo, which carries reduce-scatter and all-gather itself (src/shoal/comm/group.py), in place of
the shoal backend.

    python benchmarks/comm.py [--backend shoal] [--rounds 20] [--only all_reduce] [--json]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import add_ratio, arguments, report

SIZES = {f"{n} KB": n << 10 for n in (4, 64, 256)} | {f"{n} MB": n << 20 for n in (1, 4, 16, 64)}
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
PEER, LIMIT = "gloo", "copy"


def contest(settings: dict[str, Any], channel: Any) -> dict[str, list[float]]:
    """On every rank: seconds of every (kind, size, who), a list over rounds; the slower rank counts."""
    import torch
    import torch.distributed as dist

    from shoal.comm.group import BACKENDS
    from shoal.launch.join import join, leave

    me = join(backend=BACKENDS[settings["backend"]])
    groups = {PEER: dist.new_group(backend="gloo"), "mine": dist.new_group(backend=me.backend)}
    times: dict[str, list[float]] = {}
    for size, num_bytes in SIZES.items():
        whole, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        part = torch.zeros(num_bytes // 4 // me.world)
        calls = {
            "all_reduce": lambda group, whole=whole: dist.all_reduce(whole, group=group),
            "reduce_scatter": lambda g, part=part, whole=whole: dist.reduce_scatter_single(part, whole, group=g),
            "all_gather": lambda g, part=part, whole=whole: dist.all_gather_single(whole, part, group=g),
            "all_to_all": lambda g, other=other, whole=whole: dist.all_to_all_single(other, whole, group=g),
        }
        repeats = max(2, min(50, (16 << 20) // num_bytes))
        for kind in settings["kinds"]:
            for turn in range(settings["rounds"] + 1):
                for who in (*groups, LIMIT):
                    dist.barrier(group=groups[PEER])
                    for repeat in range(-1, repeats):
                        if repeat == 0:
                            start = time.perf_counter()
                        other.copy_(whole) if who == LIMIT else calls[kind](groups[who])
                    mine = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
                    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=groups[PEER])
                    if turn:
                        times.setdefault(f"{kind} {size} {who}", []).append(float(mine))
        if me.rank == 0:
            channel.say({"size": size})
    leave()
    return times


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--backend", choices=("shoal", "gloo"), default="shoal")
        parser.add_argument("--only", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}, with commas between")
        parser.add_argument("--rounds", type=int, default=20)

    asked = arguments(__doc__ or "", extend)
    from shoal.launch import run_ranks

    kinds = asked.only.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        sys.exit(f"--only {unknown[0]}: there is no such collective here; there are {', '.join(KINDS)}")
    times = run_ranks(
        "comm:contest",
        {"rounds": asked.rounds, "backend": asked.backend, "kinds": kinds},
        ranks=2,
        on_message=lambda rank, message: print(f"{message['size']} done", file=sys.stderr, flush=True),
    )[0]
    rows = []
    for kind in kinds:
        for size in SIZES:
            mine, gloo, copy = (times[f"{kind} {size} {who}"] for who in ("mine", PEER, LIMIT))
            row: dict[str, Any] = {"name": f"{kind} {size}", "ms": round(1000 * sorted(mine)[len(mine) // 2], 3)}
            add_ratio(row, "of_limit", mine, copy)
            row["peer"] = PEER
            add_ratio(row, "of_peer", mine, gloo)
            rows.append(row)
    report(rows, title=f"Collectives of two ranks, {asked.backend}", as_json=asked.json)


if __name__ == "__main__":
    main()
