"""Does an ensemble beat its mean member, and what does one network keep that learns from it?

    python benchmarks/ensemble.py [--members 3] [--steps 300] [--seeds 0 100 200] [--markdown]

Trains `ensemble(members, distill=True)` on both built-in tasks from each seed and prints, for every metric, the mean
over seeds (and the range) of: the mean member, the members together, and the student, which trains as long as a member.
A snapshot ensemble is measured beside: one member of the same number of steps, whose rate falls to zero once for each
snapshot.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import shoal
from shoal.job import load_job
from shoal.job.schedule import Cyclic

TASKS = {"language:tiny": "loss", "image:vgg:tiny": "accuracy"}


def trained(task: str, *, members: int, steps: int, seed: int, folder: Path) -> dict[str, dict[str, float]]:
    """What each kind of model reaches."""
    quiet: dict[str, Any] = {"gate": False, "on_message": lambda message: None, "stop_at_target": False}
    run = shoal.train(
        task,
        f"ensemble({members}, distill=True)",
        folder=folder / "ensemble",
        steps=steps,
        seed=seed,
        checkpoint_every=0,
        evaluate_every=0,
        **quiet,
    )
    job = replace(load_job(task), schedule=Cyclic(steps=steps, cycles=members))
    once = shoal.train(
        job,
        "serial",
        folder=folder / "snapshots",
        steps=steps,
        seed=seed,
        checkpoint_every=steps // members,
        keep=members,
        evaluate_every=0,
        **quiet,
    )
    cycled = shoal.evaluate_together(sorted((once.folder / "checkpoints").glob("step-*"))[-members:], job=job)
    summary = run.summary
    return {
        "mean member": summary["mean_alone"],
        "together": summary["together"],
        "student": summary["student"],
        "snapshots together": cycled.together,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 100, 200])
    asked = parser.parse_args()
    print(f"| task | metric | {' | '.join(KINDS)} | ensemble better in |\n|---|---|{'---:|' * (len(KINDS) + 1)}")
    for task, decides in TASKS.items():
        rows = []
        for seed in asked.seeds:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(trained(task, members=asked.members, steps=asked.steps, seed=seed, folder=Path(folder)))
        for metric in rows[0]["together"]:
            cells = []
            for kind in KINDS:
                values = [row[kind][metric] for row in rows]
                cells.append(f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
            sign = -1 if metric == "accuracy" else 1
            wins = sum(sign * row["together"][metric] < sign * row["mean member"][metric] for row in rows)
            mark = " *" if metric == decides else ""
            print(f"| {task} | {metric}{mark} | {' | '.join(cells)} | {wins} of {len(rows)} |", flush=True)


KINDS = ("mean member", "together", "student", "snapshots together")

if __name__ == "__main__":
    main()
