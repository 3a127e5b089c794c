"""Kills runs at random and resumes them until the time is up; each must end in the bits of an undisturbed run.

    python tests/soak.py --minutes 5 --seed 1      (make soak MINUTES=5)

Strategies, victims (all ranks, one rank, or the process that started them) and moments are drawn from the seed.
Everything is written to a temporary folder, which is removed at the end unless a difference was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from distributed.training_targets import checkpoint_bytes, curve
from shoal.checkpoint.files import checkpoints
from shoal.launch import RankFailed, run_ranks
from shoal.strategy import parse

JOB = str(Path(__file__).parent / "distributed" / "jobs" / "residual.py") + ":job"
TARGET = "distributed.training_targets:train_and_tell_pid"
STEPS, KILLS_A_RUN, MOST_STEPS = 60, 12, 6
STRATEGIES = [
    "dp(2)",
    "dp(2, zero=1)",
    "dp(2, zero=2)",
    "dp(2, zero=3)",
    "dp(3, zero=3) * accumulate(2)",
    "dp(2, via=shared())",
    "dp(3, via=shared())",
    "dp(2, via=shared()) * accumulate(2)",
    "dp(2) * dp(2, via=shared())",
    'pp(2, "1f1b", micro=2)',
    'pp(2, "gpipe", micro=2) * dp(2, zero=1)',
    'pp(2, "1f1b", micro=2) * dp(2, via=shared())',
    "tp(2)",
    "dp(2, zero=1) * tp(2)",
    "dp(2, compress=topk(0.1))",
    'dp(2) * recompute("full")',
    "dp(2, sync=local(3))",
    "dp(2, sync=diloco(3)) * dp(2, zero=3)",
]


def settings(strategy: str, folder: Path) -> dict[str, Any]:
    common = {"job": JOB, "steps": STEPS, "evaluate_every": 20, "checkpoint_every": 3, "gate": False}
    if checkpoints(folder / "checkpoints"):
        common["resume"] = str(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return {**common, "strategy": strategy, "folder": str(folder)}


class Killer:
    """Kills one rank or all of them: a moment after their start, or in or after one of the next steps."""

    def __init__(self, strategy: str, chance: random.Random) -> None:
        self.world, self.pids, self.victims = parse(strategy).world, {}, chance.choice(["one rank", "all ranks"])
        if "sync=" in strategy:
            self.victims = "all ranks"  # The loss of one island does not end a run (test_lost_islands.py).
        self.which = chance.randrange(self.world)
        self.steps = chance.randint(1, MOST_STEPS) if chance.random() < 0.7 else None
        """After so many steps; None: while ranks start and restore."""
        self.after_s = chance.uniform(0.0, 0.03 if self.steps else 0.6)
        self.timer: threading.Timer | None = None

    def message(self, rank: int, message: dict[str, Any]) -> None:
        if message["event"] == "process":
            self.pids[rank] = message["pid"]
            if len(self.pids) == self.world and self.steps is None:
                self._start()
        elif message["event"] == "step" and self.steps is not None and self.timer is None:
            self.steps -= 1
            if self.steps <= 0:
                self._start()

    def _start(self) -> None:
        self.timer = threading.Timer(self.after_s, self.kill)
        self.timer.start()

    def kill(self) -> None:
        chosen = self.pids.values() if self.victims == "all ranks" else [self.pids[self.which]]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer.join()


def life(asked: dict[str, Any], chance: random.Random | None) -> str:
    """One start of a run: how it ended."""
    world = parse(asked["strategy"]).world
    killer = Killer(asked["strategy"], chance) if chance is not None else None
    try:
        run_ranks(TARGET, asked, ranks=world, on_message=killer.message if killer else None, hang_after_s=120.0)
        return "finished"
    except RankFailed as error:
        if killer is None or "SIGKILL" not in str(error):
            raise
        return f"killed {killer.victims}"
    finally:
        if killer is not None:
            killer.stop()


def life_of_a_parent(asked: dict[str, Any], chance: random.Random) -> str:
    """One start in a process of its own, which is killed while its ranks work."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(chance.uniform(0.0, 0.6))
    finished = child.poll() is not None
    child.kill()
    child.wait()
    child.stdout.close()
    return "finished" if finished else "killed the parent"


def child(asked: dict[str, Any]) -> None:
    """What `life_of_a_parent` starts: a line once the ranks are there."""
    world, pids = parse(asked["strategy"]).world, set()

    def message(rank: int, content: dict[str, Any]) -> None:
        if content["event"] == "process":
            pids.add(rank)
            if len(pids) == world:
                print("ranks are there", flush=True)

    run_ranks(TARGET, asked, ranks=world, on_message=message)


def soak(minutes: float, seed: int) -> int:
    """Runs until the time is up; 0 if every run ended in the same bits."""
    base, chance, counts = Path(tempfile.mkdtemp(prefix="shoal-soak-")), random.Random(seed), Counter()
    end_s, expected, differing = time.monotonic() + 60 * minutes, {}, []
    while time.monotonic() < end_s and not differing:
        strategy = chance.choice(STRATEGIES)
        if strategy not in expected:
            plain = base / f"plain-{len(expected)}"
            life(settings(strategy, plain), None)
            expected[strategy] = (checkpoint_bytes(plain, STEPS), curve(plain))
            assert len(expected[strategy][0]) > 10
        folder, ended = base / "disturbed", ""
        for _ in range(KILLS_A_RUN):
            if time.monotonic() > end_s:
                break
            asked = settings(strategy, folder)
            start = life_of_a_parent if chance.random() < 0.1 else life
            ended = start(asked, chance)
            if ended == "finished":
                break
            counts[ended] += 1
        if ended != "finished":
            life(settings(strategy, folder), None)
        counts["runs compared"] += 1
        print(f"{strategy}: {dict(counts)}", flush=True)
        if (checkpoint_bytes(folder, STEPS), curve(folder)) != expected[strategy]:
            differing.append(strategy)
        else:
            shutil.rmtree(folder)
    kills = sum(number for what, number in counts.items() if what.startswith("killed"))
    print(f"{kills} kills ({dict(counts)}), {len(expected)} strategies, seed {seed}")
    if differing:
        print(f"DIFFERENT: {differing[0]}; the run is in {folder}, the undisturbed ones beside it")
        return 1
    shutil.rmtree(base)
    print("no difference")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="Minutes to run for.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of what is drawn.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(json.loads(given.child))
    else:
        sys.exit(soak(given.minutes, given.seed))
