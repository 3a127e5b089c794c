"""The counting group's collectives beside plain Gloo's, two ranks, interleaved in one run.

Two of them are replaced (src/shoal/comm/group.py): reduce-scatter and all-gather. All-reduce is Gloo's own, counted:
its row shows what counting costs. The limit is a plain copy of the same bytes in memory.

    python benchmarks/collectives.py [--rounds 20] [--json]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import add_ratio, arguments, report

SIZES = {"4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "16 MB": 16 << 20}
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def contest(settings: dict[str, Any], channel: Any) -> dict[str, list[float]]:
    """On every rank: seconds of every (size, kind, who), a list over rounds; the slower rank counts."""
    import torch
    import torch.distributed as dist

    from shoal.train.launch.join import join, leave

    me = join()
    groups = {"gloo": dist.new_group(backend="gloo"), "shoal": dist.new_group(backend=me.backend)}
    times: dict[str, list[float]] = {}
    for size, num_bytes in SIZES.items():
        whole, other = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        part = torch.zeros(num_bytes // 4 // me.world)
        repeats = 20 if num_bytes < 1 << 20 else 2
        for turn in range(settings["rounds"] + 1):
            for who in [*groups, "copy"]:
                for kind in KINDS:
                    dist.barrier(group=groups["gloo"])
                    start = time.perf_counter()
                    for _ in range(repeats):
                        if who == "copy":
                            other.copy_(whole)
                        elif kind == "all_reduce":
                            dist.all_reduce(whole, group=groups[who])
                        elif kind == "reduce_scatter":
                            dist.reduce_scatter_single(part, whole, group=groups[who])
                        else:
                            dist.all_gather_single(whole, part, group=groups[who])
                    mine = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
                    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=groups["gloo"])
                    if turn:
                        times.setdefault(f"{size} {kind} {who}", []).append(float(mine))
        if me.rank == 0:
            channel.say({"size": size})
    leave()
    return times


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=20)

    asked = arguments(__doc__ or "", extend)
    from shoal.train.launch import run_ranks

    times = run_ranks(
        "collectives:contest", {"rounds": asked.rounds}, ranks=2,
        on_message=lambda rank, message: print(f"{message['size']} done", file=sys.stderr, flush=True),
    )[0]  # fmt: skip
    rows = []
    for kind in KINDS:
        for size in SIZES:
            mine, gloo, copy = (times[f"{size} {kind} {who}"] for who in ("shoal", "gloo", "copy"))
            row: dict[str, Any] = {"name": f"{kind} {size}", "ms": round(1000 * sorted(mine)[len(mine) // 2], 3)}
            add_ratio(row, "of_limit", mine, copy)
            row["peer"] = "gloo"
            add_ratio(row, "of_peer", mine, gloo)
            rows.append(row)
    report(rows, title="Collectives of two ranks", as_json=asked.json)


if __name__ == "__main__":
    main()
