"""Kills one rank of a run at random, again and again, under schemes that go on without it; each run must reach its end.

    python tests/kills.py --kills 50 --seed 1      (make kills KILLS=50)
    python tests/kills.py --kills 20 --only asp,ssp,gossip

The scheme, the victim, the place in the step and the step are drawn from the seed, and whether the rank is started
again and joins the others (`--rejoin`). Checked: the run ends by itself, at its last step, with a finite loss; its
record names the rank that was lost; no process, descriptor or file is left. A scheme is a line of SCHEMES.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from shoal.launch import run_ranks, warm_up
from shoal.proof import entry as proof
from shoal.strategy import parse
from shoal.strategy.islands import losable
from shoal.training import entry as training

JOB = str(Path(__file__).parent / "distributed" / "jobs" / "loose.py")
TARGET = "distributed.server_targets:killed_worker"
STEPS = 22
HANG_S = 60.0
SCHEMES = {
    "asp": [
        "dp(3, sync=asp(), via=ps(1))",
        "dp(4, sync=asp(), via=ps(1, colocated=True))",
        "dp(3, sync=asp(), via=ps(2), compress=topk(0.1))",
        "dp(2, sync=asp(), via=ps(1)) * dp(2)",
    ],
    "ssp": ["dp(3, sync=ssp(2), via=ps(1))", "dp(3, sync=ssp(1), via=ps(1, colocated=True))"],
    "softsync": ["dp(3, sync=softsync(2), via=ps(1))"],
    "backup": ["dp(3, sync=bsp(backup=1), via=ps(1))"],
    "hogwild": ["dp(3, sync=hogwild())"],
    "local": ["dp(3, sync=local(3))", "dp(2, sync=local(2)) * dp(2)"],
    "diloco": [
        "dp(3, sync=diloco(3))",
        "dp(3, sync=diloco(3, fragments=2, overlap=1))",
        "dp(3, sync=diloco(3), compress=topk(0.1))",
    ],
    "quorum": ["dp(3, sync=diloco(3, quorum=2))", "dp(3, sync=diloco(4, quorum=2, fragments=2, overlap=1))"],
    "elastic": ["dp(3, sync=elastic(2, 0.3))", 'dp(3, sync=elastic(2, 0.3, "async"))'],
    "gossip": [
        'dp(4, sync=gossip("ring"))',
        'dp(4, sync=gossip("ring", "async"))',
        'dp(4, sync=gossip("one-peer", "push-sum"))',
    ],
}
"""Strategies by the name of their scheme."""
POINTS = ("step: forward", "step: backward done", "step: sums received", "step: updated", "step: published")


def drawn(chance: random.Random, names: list[str]) -> tuple[str, int, str, int, bool]:
    """A strategy, the rank to kill, where in a step, at which time that it comes there, and whether it comes back."""
    strategy = chance.choice(SCHEMES[chance.choice(names)])
    victim = chance.choice([rank for island in losable(parse(strategy))[1:] for rank in island])
    return strategy, victim, chance.choice(POINTS), chance.randint(1, STEPS - 3), chance.random() < 0.5


def wrong(found: list[Any], folder: Path, strategy: str, victim: int) -> str | None:
    """What is wrong with the end of a run, as a sentence."""
    first = found[0]
    came = [rank for row in first.get("recovery", ()) for rank in row.get("came", ())]
    if found[victim] is not None and victim not in came:
        return None if first["status"] == "finished" else f"it ended as {first['status']}, and nobody was killed"
    if first["status"] != "finished" or first["step"] != STEPS:
        return f"it ended as {first['status']} at step {first['step']} of {STEPS}"
    if not math.isfinite(first["metrics"]["loss"]):
        return f"its validation loss is {first['metrics']['loss']}"
    noted = [rank for row in first.get("lost", ()) for rank in row["ranks"]]
    counted = first.get("servers", first.get("hogwild", {})).get("lost_workers", ())
    if victim not in noted and not counted:
        return f"nothing in its record says that rank {victim} was lost"
    if not (folder / "run.json").exists():
        return "it left no record"
    return None


def left_behind() -> Counter[str]:
    """Descriptors of this process, and its children other than the server that forks ranks."""
    found = Counter({"descriptors": len(os.listdir("/proc/self/fd"))})
    for task in os.listdir("/proc/self/task"):
        children = Path(f"/proc/self/task/{task}/children").read_text().split()
        found["processes"] += sum(len(_descendants(int(pid))) for pid in children)
    return found


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [pid, *(each for child in children for each in _descendants(child))]


def kills(number: int, seed: int, names: list[str]) -> int:
    """As many runs; 0 if all ended well."""
    warm_up(*training.MODULES, *proof.MODULES, TARGET.partition(":")[0])
    chance, killed, returned, failures, before = random.Random(seed), 0, 0, [], None
    for at in range(number):
        strategy, victim, point, times, rejoin = drawn(chance, names)
        with tempfile.TemporaryDirectory(prefix="shoal-kills-") as folder:
            run = Path(folder) / "run"
            asked = {
                "job": JOB,
                "strategy": strategy,
                "folder": str(run),
                "gate": False,
                "checkpoint_every": 11,
                "rejoin": rejoin,
                "disturbed": [(victim, point, times, None)],
            }
            chosen, start_s = parse(strategy), time.monotonic()
            try:
                found = run_ranks(
                    TARGET, asked, ranks=chosen.world, islands=losable(chosen), hang_after_s=HANG_S, rejoin=rejoin
                )
                what = wrong(found, run, strategy, victim)
                back = any("came" in row for row in found[0].get("recovery", ()))
                killed, returned = killed + (found[victim] is None or back), returned + back
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
        now = left_behind()
        before = before or now  # The first run starts the server that forks ranks.
        if what is None and now - before:
            what = f"it left {dict(now - before)} behind"
        line = f"{at + 1}: {strategy}, rank {victim} at {point!r} number {times}{', to come back' * rejoin}"
        line += f", {time.monotonic() - start_s:.1f} s"
        print(f"{line}: {what or 'well'}", flush=True)
        if what is not None:
            failures.append(line)
    print(f"{killed} of {number} runs lost a rank, {returned} had it back, {len(failures)} ended badly, seed {seed}")
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="Runs, each with one kill.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of what is drawn.")
    parser.add_argument("--only", default=",".join(SCHEMES), help="Names of schemes.")
    given = parser.parse_args()
    sys.exit(kills(given.kills, given.seed, given.only.split(",")))
