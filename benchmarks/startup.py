"""Seconds from a command to its first result: four ranks to the end of their first step, and a proof of a tiny job.

Each round runs every command once in each tree, one after the other, so that whatever else the machine does meets all
trees alike. A tree is a checkout with its own `.venv`; another commit's comes from `git worktree add`.

    python benchmarks/startup.py [--trees . ../old] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report

TRAIN = ("train", "language:tiny", "--strategy", "dp(4)", "--steps", "1", "--folder", "run")
VERIFY = ("verify", "language:tiny", "--strategy", "dp(2)")
CASES = {
    "train on 4 ranks, to the end of step 1": (TRAIN, "step 1/1"),
    "the same, strategy not proven yet": (TRAIN, "step 1/1"),
    "verify on 2 ranks": (VERIFY, None),
}
"""The command, and the start of the line that ends the measurement; None is the end of the command."""


def measure(tree: Path, case: str, cache: Path) -> tuple[float, float]:
    """Seconds to the line, and CPU seconds of all processes to the end of the command."""
    command, line = CASES[case]
    if "not proven" in case:
        shutil.rmtree(cache, ignore_errors=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        before, start = os.times(), time.perf_counter()
        process = subprocess.Popen(
            [tree / ".venv/bin/shoal", *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        seconds, said = None, []
        for text in process.stderr:
            said.append(text)
            if line is not None and text.startswith(line):
                seconds = time.perf_counter() - start
        status = process.wait()
        ended, after = time.perf_counter() - start, os.times()
    if status != 0 or (line is not None and seconds is None):
        raise SystemExit(f"{tree}: shoal {' '.join(command)} ended with {status}:\n{''.join(said)}")
    used = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return (ended if seconds is None else seconds), used


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--trees", nargs="+", type=Path, default=[Path(__file__).parent.parent])
        parser.add_argument("--rounds", type=int, default=5)

    settings = arguments("Seconds from a command to its first result.", extend)
    trees = [tree.absolute() for tree in settings.trees]
    found: dict[tuple[str, Path], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as caches:
        for turn in range(settings.rounds + 1):
            for case in CASES:
                for number, tree in enumerate(trees):
                    took = measure(tree, case, Path(caches) / str(number))
                    if turn > 0:  # The first round fills the system's file cache and remembers proofs.
                        found.setdefault((case, tree), []).append(took)
    rows = [
        {
            "name": case,
            "tree": tree.name,
            "median_s": statistics.median(seconds for seconds, _ in took),
            "least_s": min(seconds for seconds, _ in took),
            "cpu_s": statistics.median(cpu for _, cpu in took),
        }
        for (case, tree), took in found.items()
    ]
    report(rows, title="start-up", as_json=settings.json)


if __name__ == "__main__":
    main()
