"""The figures of a comparison, from the runs in its folder: one row for each contestant, job and number of ranks.

Speed is measured in the window after the first steps, and the median of a run counts; wall time to a metric counts the
first steps as steady ones, so that no contestant's compilation decides. Figures are means over seeds, with the spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.comparison.beside import beside
from shoal.comparison.explaining.causes import causes
from shoal.comparison.guard import Finding, Seen, judge
from shoal.comparison.protocol import COMPARISON, FACTS, REFERENCE, WARMUP_STEPS, Cell, is_strategy
from shoal.comparison.splits import bubble_of, compression, consistency, imbalance, split_s, wire_s
from shoal.comparison.survey import survey_of
from shoal.strategy import parse
from shoal.strategy.contract import contract
from shoal.strategy.islands import is_loose
from shoal.training.record.run import Run, read_json, read_run

HIGHER = ("accuracy", "f1", "recall", "precision", "bleu")


class Measured:
    """One run with its facts."""

    def __init__(self, folder: Path) -> None:
        self.facts = read_json(folder / FACTS)
        self.cell = Cell(**self.facts["cell"])
        self.run: Run = read_run(folder)
        self.ok = self.facts["status"] == "finished" and self.run.status == "finished"
        self.step_s = [float(row["step_s"]) for row in self.run.steps]
        self.window = self.step_s[WARMUP_STEPS:] or self.step_s
        self.usual_s = statistics.median(self.window) if self.window else 0.0
        times, total = [], 0.0
        for number, seconds in enumerate(self.step_s):
            total += min(seconds, self.usual_s) if number < WARMUP_STEPS else seconds
            times.append(total)
        self.clock = times

    @property
    def curve(self) -> list[tuple[int, float, Mapping[str, float]]]:
        """(step, seconds, metrics) of each evaluation."""
        return [
            (row["step"], self.clock[row["step"] - 1], row["metrics"])
            for row in self.run.validation
            if row["step"] <= len(self.clock)
        ]

    def seen(self) -> Seen:
        ranks = [each for each in self.facts["ranks"] if each]
        return Seen(seed=self.cell.seed, losses=self.run.losses, step_s=self.step_s, ranks=ranks)


def measured(folder: Path) -> list[Measured]:
    """All runs of a comparison."""
    return [Measured(path.parent) for path in sorted(folder.glob(f"runs/*/*/{FACTS}"))]


def results(folder: Path) -> dict[str, Any]:
    """All that a report shows, as plain values."""
    asked = read_json(folder / COMPARISON)
    runs = measured(folder)
    jobs = []
    for job, facts in asked["jobs"].items():
        mine = [each for each in runs if each.cell.job == job and each.cell.contestant in asked["contestants"]]
        jobs.append(_job(job, facts, mine, asked))
        if asked["question"].get("preset") == "survey":
            # Counted by the loss: tokens of a text, or one class of an image.
            task = "gpt2" if facts["counted_per_sample"] > 1 else "vgg16"
            jobs[-1]["survey"] = survey_of(jobs[-1]["rows"], task=task)
    loads = [rank["load"] for each in runs for rank in each.facts["ranks"][:1] if rank and "load" in rank]
    if loads:
        words = f"{statistics.median(loads):.2g} (median of the runs; above 1 other programs took part of the time)"
        asked["machine"]["processes for each core"] = words
    return {**{name: asked[name] for name in ("question", "environment", "machine", "started")}, "jobs": jobs}


def _job(job: str, facts: Mapping[str, Any], runs: list[Measured], asked: Mapping[str, Any]) -> dict[str, Any]:
    metric, higher, target = _deciding(facts, runs)
    groups: dict[tuple[str, int], list[Measured]] = {}
    for each in runs:
        if each.cell.contestant != REFERENCE or each.cell.shares == 1:
            groups.setdefault((each.cell.contestant, each.cell.ranks), []).append(each)
    rows = [
        _row(name, ranks, group, _references(runs, group[0].cell, facts, asked), facts, metric, higher, target)
        for (name, ranks), group in groups.items()
    ]
    _scaling(rows, bool(asked["question"]["per_rank"]))
    rows.sort(key=lambda row: (row["time_to_target_s"] is None, row["time_to_target_s"] or 0, row["step_s"] or 1e9))
    absent = [
        {"name": key.rsplit("@", 1)[0], "ranks": int(key.rsplit("@", 1)[1]), "why": why}
        for key, why in facts["refused"].items()
        if why
    ]
    return {
        "job": job,
        "name": facts["name"],
        "parameters": facts["parameters"],
        "batch": facts["batch"],
        "steps": max((len(each.step_s) for each in runs), default=0),
        "metric": metric,
        "higher": higher,
        "target": target,
        "rows": rows,
        "absent": absent,
        "batch_norm": facts["batch_norm"],
        "flops_per_sample": facts["flops_per_sample"],
        "peak_flops_per_s": facts["peak_flops_per_s"],
        "counted_per_sample": facts["counted_per_sample"],
        "samples": facts.get("samples"),
        "beside": beside(rows),
    }


def _references(
    runs: Sequence[Measured], cell: Cell, facts: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[Measured]:
    apart = facts["batch_norm"] or asked["question"]["per_rank"]
    shares = cell.ranks if apart else 1
    return [each for each in runs if each.ok and each.cell.contestant == REFERENCE and each.cell.shares == shares]


def _deciding(facts: Mapping[str, Any], runs: Sequence[Measured]) -> tuple[str, bool, float | None]:
    """The validation metric that decides, whether more is better, and the target: the job's, or what the reference
    reaches with every seed."""
    curves = [each.curve for each in runs if each.ok and each.cell.contestant == REFERENCE and each.curve]
    if facts["target"] is not None:
        metric, value, better = facts["target"]
        return metric, better == "higher", value
    names = list(curves[0][-1][2]) if curves else ["loss"]
    metric = next((name for name in HIGHER if name in names), "loss" if "loss" in names else names[0])
    higher = metric in HIGHER
    extreme = max if higher else min
    best = [extreme(row[2][metric] for row in curve) for curve in curves]
    if not best:
        return metric, higher, None
    worst = min(best) if higher else max(best)
    # Islands and compression end a little above it; within two hundredths is the same quality.
    return metric, higher, worst * (0.98 if higher else 1.02)


def _row(
    name: str,
    ranks: int,
    group: list[Measured],
    references: list[Measured],
    facts: Mapping[str, Any],
    metric: str,
    higher: bool,
    target: float | None,
) -> dict[str, Any]:
    good = [each for each in group if each.ok]
    own = is_strategy(name)
    title = (facts["titles"].get(name) or ["Shoal"])[0]
    row: dict[str, Any] = {
        "name": name,
        "title": title,
        "ranks": ranks,
        "own": own,
        "seeds": len(good),
        "key": f"{name}@{ranks}",
        "failed": [each.facts.get("reason") or each.run.reason or "it did not end" for each in group if not each.ok],
        "same_as": None if own or not facts["titles"].get(name) else facts["titles"][name][1].format(n=ranks),
        "contract": str(contract(parse(name))) if own else "exact" if facts["titles"][name][2] else "statistical",
        "step_s": None,
        "time_to_target_s": None,
    }
    if not good:
        return {**row, "verdict": "failed", "findings": []}
    reached = [_reached(each, metric, higher, target) for each in good]
    steps = [seconds for each in good for seconds in each.window]
    usual = [each.usual_s for each in good]
    batch = good[0].run.steps[0]["samples"] if good[0].run.steps else facts["batch"]
    step_s = statistics.fmean(usual)
    finals = [each.curve[-1][2][metric] for each in good if each.curve]
    peaks = [max(rank.get("peak_bytes", 0) for rank in each.facts["ranks"] if rank) for each in good]
    sent = good[0].run.sent_bytes if own else None
    strategy, samples = parse(name) if own else None, facts.get("samples") or batch
    steps_to_target = statistics.fmean(r[0] for r in reached if r) if all(reached) else None
    flops = facts["flops_per_sample"] * batch
    row |= {
        "step_s": step_s,
        "step_spread_s": spread(usual),
        "samples_per_s": batch / step_s,
        "tokens_per_s": batch * facts["counted_per_sample"] / step_s,
        "quantiles_s": _quantiles(steps),
        "memory_bytes": statistics.fmean(peaks),
        "memory_spread_bytes": spread(peaks),
        "final": statistics.fmean(finals) if finals else None,
        "final_spread": spread(finals),
        "time_to_target_s": statistics.fmean(r[1] for r in reached if r) if all(reached) else None,
        "time_spread_s": spread([r[1] for r in reached if r]),
        "steps_to_target": steps_to_target,
        "epochs_to_target": None if steps_to_target is None else steps_to_target * batch / samples,
        "epoch_s": step_s * samples / batch,
        "global_batch": batch,
        "held_bytes": statistics.fmean(_most(each, "held_bytes") for each in good),
        "sent_messages": sum(e.messages for e in good[0].run.ledger.entries.values()) if own else None,
        "wire_s": wire_s(good[0].run.ledger, [_ranks(each)[0].get("link") for each in good]) if own else None,
        "compression": compression(strategy, sent, facts["parameters"]),
        **consistency([each.run.summary for each in good]),
        "reached": sum(each is not None for each in reached),
        "sent_bytes": sent,
        "predicted_bytes": good[0].run.predicted_bytes,
        "predicted_step_s": (facts.get("predicted") or {}).get(name),
        "held_back": _held_back(good[0].run) if own else None,
        "utilisation": flops / step_s / (ranks * facts["peak_flops_per_s"]),
        "split_s": split_s(
            [(_ranks(each), _evaluated(each)) for each in good],
            bubble=bubble_of(strategy),
            pipeline="pp(" in (name if own else row["same_as"] or ""),
        ),
        "imbalance": imbalance([_ranks(each) for each in good]),
        "curves": [_curve(each, metric) for each in good],
        "losses": [thin(each.run.losses) for each in good[:1]],
        "timeline_s": good[0].step_s[:60],
        "link": [each.facts["ranks"][0].get("link") for each in good],
        "folders": [str(each.run.folder) for each in good],
    }
    findings = _findings(name, own, row["contract"], good, references, facts)
    return {**row, "findings": [asdict(each) for each in findings], "verdict": verdict(findings)}


def _held_back(run: Run) -> str | None:
    """The first cause of one of Shoal's own runs."""
    found = causes(
        run.strategy,
        run.summary.get("ranks") or (),
        ledger=run.ledger,
        arguments=run.arguments,
        environment=run.environment,
    )
    return found[0].line if found else None


def verdict(findings: Sequence[Finding]) -> str:
    """In one word."""
    kinds = {each.kind for each in findings}
    for kind, word in (("breach", "unfair"), ("too-well", "too well"), ("worse", "worse")):
        if kind in kinds:
            return word
    return "another algorithm" if "departure" in kinds else "fair"


def _findings(
    name: str, own: bool, promise: str, good: list[Measured], references: list[Measured], facts: Mapping[str, Any]
) -> list[Finding]:
    if name == REFERENCE:
        return []
    exact = promise.startswith("exact")
    strategy = parse(name) if own else None
    micro = strategy.micro_batches if strategy is not None else 1
    loose = strategy is not None and (bool(strategy.servers) or any(is_loose(level) for level in strategy.dp_levels))
    follows = not facts["batch_norm"] or (micro == 1 and (strategy is None or strategy.replicas == strategy.world))
    found = judge(
        [each.seen() for each in good],
        [each.seen() for each in references],
        exact=exact,
        follows=follows,
        warmup=WARMUP_STEPS,
        reads_alike=not loose,
    )
    if not exact:
        what = f"its contract is {promise}" if own else "it is not the serial algorithm"
        found.append(Finding(name="algorithm", kind="departure", text=f"{what}: it is judged by its loss over seeds"))
    return found


def _reached(run: Measured, metric: str, higher: bool, target: float | None) -> tuple[int, float] | None:
    """(Step, seconds) of the first evaluation that is as good as the target, between evaluations by interpolation."""
    before: tuple[int, float, float] | None = None
    for step, seconds, metrics in run.curve if target is not None else ():
        value = metrics[metric]
        if target is not None and (value >= target if higher else value <= target):
            if before is None or before[2] == value:
                return step, seconds
            part = (target - before[2]) / (value - before[2])
            return round(before[0] + part * (step - before[0])), before[1] + part * (seconds - before[1])
        before = step, seconds, value
    return None


def _ranks(run: Measured) -> list[Mapping[str, Any]]:
    return [rank for rank in run.facts["ranks"] if rank]


def _evaluated(run: Measured) -> set[int]:
    return {row["step"] for row in run.run.validation}


def _most(run: Measured, name: str) -> float:
    """Of the rank that has most."""
    return max((float(rank.get(name) or 0) for rank in _ranks(run)), default=0.0)


def _curve(run: Measured, metric: str) -> list[list[float]]:
    return [[step, seconds, metrics[metric]] for step, seconds, metrics in run.curve]


def thin(values: Sequence[float], most: int = 120) -> list[list[float]]:
    every = max(1, len(values) // most)
    return [[number + 1, value] for number, value in enumerate(values) if number % every == 0]


def _quantiles(values: Sequence[float]) -> list[float]:
    """The 5th, 25th, 50th, 75th and 95th percentile."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.05, 0.25, 0.5, 0.75, 0.95)]


def spread(values: Sequence[float]) -> float:
    """The standard deviation over seeds; 0 with one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _scaling(rows: list[dict[str, Any]], weak: bool) -> None:
    """Speed-up over its own single rank, and over the fastest single rank of all."""
    single = {row["name"]: row["samples_per_s"] for row in rows if row["ranks"] == 1 and row["step_s"]}
    serial = [row["samples_per_s"] for row in rows if row["ranks"] == 1 and row["step_s"]]
    for row in rows:
        if row["step_s"]:
            alone = single.get("serial" if row["own"] else row["name"])
            row["speedup_own"] = row["samples_per_s"] / alone if alone else None
            row["speedup_best"] = row["samples_per_s"] / max(serial) if serial else None
            row["efficiency"] = row["speedup_best"] / row["ranks"] if serial else None
            row["scaling"] = "weak" if weak else "strong"
