"""Whether a message of a pipeline holds its ranks up: micro-batches through two stages, with small messages and large.

Each stage computes a fixed product; rank 0 sends on what it has (asynchronously), rank 1 has its receive posted ahead,
as the engine does. If a message held nobody up, large messages would cost nothing but the first one's way; if it keeps
both ends busy, every micro-batch takes longer by its transfer. Sizes take turns, round after round; medians count, of
the time and of the processor's time of each rank (which a loaded machine does not stretch).

    python benchmarks/pipeline_messages.py [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

SIZES = (1 << 10, 1 << 20, 4 << 20, 16 << 20)
MICRO = 8
SIDE = 384


def contest(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On both ranks: (seconds, processor's seconds) of a run of micro-batches, by size and round; and of messages that
    nothing is computed between."""
    import torch
    import torch.distributed as dist

    from shoal.launch.join import join, leave

    me = join()
    group = dist.new_group([0, 1], backend=me.backend)
    factor = torch.randn(SIDE, SIDE)
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(settings["rounds"] + 1):
        for size in SIZES:
            for computing in (True, False):
                messages = [torch.zeros(size // 4) for _ in range(MICRO)]
                dist.barrier(group=group)
                start_s, cpu_s = time.perf_counter(), time.process_time()
                if me.rank == 0:
                    sent = []
                    for message in messages:
                        if computing:
                            factor @ factor @ factor
                        sent.append(dist.isend(message, dst=1, group=group))
                    for work in sent:
                        work.wait()
                else:
                    due = [dist.irecv(messages[0], src=0, group=group)]
                    for number in range(MICRO):
                        due[number].wait()
                        if number + 1 < MICRO:
                            due.append(dist.irecv(messages[number + 1], src=0, group=group))
                        if computing:
                            factor @ factor @ factor
                took = (time.perf_counter() - start_s) / MICRO, (time.process_time() - cpu_s) / MICRO
                if turn:
                    found.setdefault(f"{size} {computing}", []).append(took)
    leave()
    return found


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)


def main() -> None:
    asked = arguments(__doc__ or "", _extend)
    from shoal.launch import run_ranks

    both = run_ranks("pipeline_messages:contest", {"rounds": asked.rounds}, ranks=2)

    def median_ms(rank: int, size: int, computing: bool, which: int) -> float:
        return 1000 * statistics.median(row[which] for row in both[rank][f"{size} {computing}"])

    rows = []
    for size in SIZES:
        base = SIZES[0]
        rows.append(
            {
                "name": f"{size >> 10} KB",
                "micro-batch_ms": median_ms(1, size, True, 0),
                "longer_ms": median_ms(1, size, True, 0) - median_ms(1, base, True, 0),
                "message alone_ms": median_ms(1, size, False, 0),
                "sender's processor, more_ms": median_ms(0, size, True, 1) - median_ms(0, base, True, 1),
                "receiver's processor, more_ms": median_ms(1, size, True, 1) - median_ms(1, base, True, 1),
            }
        )
    report(rows, title=f"{MICRO} micro-batches through two stages, {asked.rounds} rounds", as_json=asked.json)


if __name__ == "__main__":
    main()
