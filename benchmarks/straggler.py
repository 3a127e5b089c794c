"""What one slow rank costs: samples per second with a 3x straggler as a fraction of those without.

    python benchmarks/straggler.py [--rounds 3] [--factor 3] [--steps 96] [--json]

Four replicas that sleep 20 ms in each step in place of computing (`--straggler "all: 20 ms"`), so that four of them fit
on two cores; the straggler sleeps three times as long. Rounds alternate between both. A step counts as a global batch,
less the gradients that servers dropped. The limit is what replicas do that never wait for each other: here
(3 + 1/3) / 4 = 0.83.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

from shoal.training.local import train_job

REPLICAS = 4
ALL = "all: 20 ms"
STRATEGIES = (
    "dp(4)",
    "dp(4, sync=bsp(backup=1), via=ps(1))",
    "dp(4, sync=ssp(3), via=ps(1))",
    "dp(4, sync=softsync(2), via=ps(1))",
    "dp(4, sync=asp(), via=ps(1))",
    "dp(4, sync=local(16))",
    "dp(4, sync=diloco(16))",
    'dp(4, sync=gossip("ring"))',
    'dp(4, sync=gossip("ring", "async"))',
    'dp(4, sync=elastic(4, 0.2, "async"))',
)


def rate(strategy: str, *, steps: int, straggler: str) -> tuple[float, float]:
    """(samples per second until every replica has done its part, share of the samples that counted)."""
    moments: dict[str, float] = {}

    def listen(message: dict[str, Any]) -> None:
        if message.get("event") == "step":
            moments.setdefault("first", time.perf_counter() - message["step_s"])
        elif message.get("event") == "metrics":  # All replicas have met, for the evaluation at the end.
            moments["last"] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        run = train_job(
            "language:tiny",
            strategy,
            folder=Path(folder, "run"),
            steps=steps,
            straggler=straggler,
            gate=False,
            evaluate_every=0,
            checkpoint_every=0,
            on_message=listen,
        )
    dropped = (run.summary.get("servers") or {}).get("dropped") or 0
    used = 1 - dropped / (steps * REPLICAS)
    return used * steps * run.summary["global_batch"] / (moments["last"] - moments["first"]), used


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=96)


def main() -> None:
    asked = arguments(__doc__ or "", extend)
    rows: list[dict[str, Any]] = []
    found: dict[str, list[tuple[float, float, float]]] = {each: [] for each in STRATEGIES}
    for number in range(asked.rounds):
        for strategy in STRATEGIES:
            free, _ = rate(strategy, steps=asked.steps, straggler=ALL)
            slowed, used = rate(strategy, steps=asked.steps, straggler=f"{ALL}; rank 1: {asked.factor:g}x")
            found[strategy].append((free, slowed, used))
            print(f"round {number + 1} {strategy}: {free:.0f} -> {slowed:.0f} samples/s", file=sys.stderr, flush=True)
    for strategy, each in found.items():
        kept = [slowed / free for free, slowed, _ in each]
        rows.append(
            {
                "name": strategy,
                "free_samples_s": statistics.median(row[0] for row in each),
                "slowed_samples_s": statistics.median(row[1] for row in each),
                "kept": statistics.median(kept),
                "kept_least": min(kept),
                "kept_most": max(kept),
                "used": statistics.median(row[2] for row in each),
            }
        )
    report(rows, title=f"One {asked.factor:g}x straggler among {REPLICAS}", as_json=asked.json)


if __name__ == "__main__":
    main()
