"""Runs that were made one by one: their list, and the figures of a report about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.comparison.rows import HIGHER, spread, thin
from shoal.training.record.run import RUN, Run, RunBroken, median_step_s, read_json, read_run

MOST_LISTED = 1000


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs below a folder, newest first; what cannot be read is listed with the reason."""
    found = []
    for path in sorted(folder.glob(f"**/{RUN}"))[:MOST_LISTED]:
        try:
            facts = read_json(path)
            summary = facts.get("summary") or {}
            found.append(
                {
                    "folder": str(path.parent),
                    "job": facts["job"],
                    "strategy": facts["strategy"],
                    "ranks": facts["world"],
                    "status": facts["status"],
                    "started": facts["started"],
                    "steps": summary.get("step", 0),
                    "step_s": summary.get("step_s"),
                    "loss": summary.get("loss"),
                    "metrics": summary.get("metrics") or {},
                    "memory_bytes": summary.get("memory_bytes"),
                    "reason": facts.get("reason"),
                }
            )
        except (RunBroken, KeyError, TypeError) as error:
            found.append(
                {
                    "folder": str(path.parent),
                    "job": "?",
                    "strategy": "?",
                    "ranks": 0,
                    "status": "unreadable",
                    "started": "",
                    "steps": 0,
                    "step_s": None,
                    "loss": None,
                    "metrics": {},
                    "memory_bytes": None,
                    "reason": str(error),
                }
            )
    return sorted(found, key=lambda row: str(row["started"]), reverse=True)


def results_of_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """The figures of runs, grouped by job, as a report takes them. Nothing is judged: they had no common protocol."""
    runs = [read_run(folder) for folder in folders]
    jobs = []
    for job in dict.fromkeys(run.job for run in runs):
        mine = [run for run in runs if run.job == job]
        curves = [list(run.validation[-1]["metrics"]) for run in mine if run.validation]
        names = curves[0] if curves else ["loss"]
        metric = next((name for name in HIGHER if name in names), "loss" if "loss" in names else names[0])
        rows = [_row(run, metric) for run in mine]
        single = [row["samples_per_s"] for row in rows if row["ranks"] == 1 and row["step_s"]]
        for row in rows:
            if single and row["step_s"]:
                row["speedup_best"] = row["samples_per_s"] / max(single)
        jobs.append(
            {
                "job": job,
                "name": job,
                "parameters": None,
                "batch": None,
                "metric": metric,
                "higher": metric in HIGHER,
                "target": None,
                "rows": rows,
                "absent": [],
                "steps": max(len(run.steps) for run in mine),
                "peak_flops_per_s": None,
            }
        )
    return {
        "question": None,
        "environment": dict(runs[0].environment),
        "machine": {},
        "started": runs[0].started,
        "jobs": jobs,
    }


def _row(run: Run, metric: str) -> dict[str, Any]:
    times = [float(row["step_s"]) for row in run.steps]
    step_s = median_step_s([dict(row) for row in run.steps])
    row: dict[str, Any] = {
        "name": run.strategy,
        "title": f"{run.folder.name}, {run.status}",
        "ranks": run.world,
        "own": bool(run.contract),
        "key": str(run.folder),
        "seeds": 1,
        "failed": [run.reason or run.status] if run.status == "failed" else [],
        "same_as": None,
        "contract": run.contract,
        "verdict": run.status,
        "findings": [],
        "step_s": step_s,
        "time_to_target_s": run.time_to_target_s,
    }
    if step_s is None:
        return row
    clock = {each["step"]: each["train_s"] for each in run.steps}
    curve = [
        [e["step"], clock[e["step"]], e["metrics"][metric]]
        for e in run.validation
        if e["step"] in clock and metric in e["metrics"]
    ]
    samples = run.steps[0]["samples"]
    ordered = sorted(times[1:] or times)
    return row | {
        "step_spread_s": spread(ordered),
        "samples_per_s": samples / step_s,
        "tokens_per_s": None,
        "utilisation": None,
        "quantiles_s": [ordered[min(len(ordered) - 1, int(p * len(ordered)))] for p in (0.05, 0.25, 0.5, 0.75, 0.95)],
        "memory_bytes": run.memory_bytes,
        "memory_spread_bytes": 0.0,
        "final": curve[-1][2] if curve else None,
        "final_spread": 0.0,
        "sent_bytes": run.sent_bytes if run.contract else None,
        "predicted_bytes": run.predicted_bytes,
        "split_s": {},
        "curves": [curve],
        "losses": [thin(run.losses)],
        "timeline_s": times[:60],
        "speedup_own": None,
        "speedup_best": None,
        "efficiency": None,
    }
