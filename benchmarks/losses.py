"""What a killed replica costs those that are left, in steps: the longest wait of the first rank around the loss.

    python benchmarks/losses.py [--steps 48] [--rounds 1] [--only "dp(4, sync=local(8))"] [--json]

Four replicas that sleep 20 ms in each step in place of computing (`--straggler "all: 20 ms"`), so that four fit on two
cores. Rank 2 is killed before step 20. The cost is the time of the longest step after it, less the usual time of a
step, in usual steps. With `--rejoin` the rank comes back at the next evaluation; that pause is a figure of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

from shoal.training.local import train_job

KILLED = 20
STRATEGIES = (
    "dp(4, sync=asp(), via=ps(1))",
    "dp(4, sync=ssp(3), via=ps(1))",
    "dp(4, sync=softsync(2), via=ps(1))",
    "dp(4, sync=bsp(backup=1), via=ps(1))",
    "dp(4, sync=local(8))",
    "dp(4, sync=diloco(8))",
    "dp(4, sync=diloco(8, quorum=3))",
    'dp(4, sync=gossip("ring"))',
    'dp(4, sync=gossip("ring", "async"))',
    "dp(4, sync=elastic(4, 0.2))",
    "dp(4, sync=hogwild())",
)


def cost(strategy: str, *, steps: int) -> dict[str, Any]:
    """What one loss cost, and the return."""
    with tempfile.TemporaryDirectory() as folder:
        run = train_job(
            "language:tiny",
            strategy,
            folder=Path(folder, "run"),
            steps=steps,
            straggler="all: 20 ms",
            gate=False,
            fail=f"rank 2 at step {KILLED}",
            rejoin=True,
            evaluate_every=8,
            checkpoint_every=8,
            on_message=lambda message: None,
        )
    rows = run.steps
    usual = statistics.median(row["step_s"] for row in rows[1:])
    around = [row["step_s"] for row in rows if KILLED - 4 <= row["step"] <= KILLED + 8]
    recovery = run.summary.get("recovery") or []
    lost = next((row for row in recovery if "lost" in row), {})
    came = next((row for row in recovery if "came" in row), {})
    return {
        "name": strategy,
        "usual_ms": 1000 * usual,
        "cost_steps": (max(around) - usual) / usual,
        "detection_ms": 1000 * lost.get("detection_s", 0.0),
        "agreement_ms": 1000 * lost.get("agreement_s", 0.0),
        "lost_samples": lost.get("lost_samples"),
        "pause_ms": 1000 * came.get("pause_s", 0.0),
        "warmup_ms": 1000 * came.get("warmup_s", 0.0),
        "copying_ms": 1000 * came.get("copying_s", 0.0),
        "status": run.status,
    }


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="Strategies, separated by ;")


def main() -> None:
    asked = arguments(__doc__ or "", extend)
    wanted = [each.strip() for each in asked.only.split(";") if each.strip()] or list(STRATEGIES)
    rows = []
    for strategy in wanted:
        rounds = [cost(strategy, steps=asked.steps) for _ in range(asked.rounds)]
        rows.append(
            {
                name: statistics.median(each[name] for each in rounds) if isinstance(value, float) else value
                for name, value in rounds[0].items()
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    report(rows, title="One of four replicas is killed, and comes back", as_json=asked.json)


if __name__ == "__main__":
    main()
