"""Why a run failed, from its record: memory, a hang, a number that was not finite, a rank that was lost."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.training.record.run import Run

BEFORE = 50
"""Steps before the end whose losses count as usual."""
GROWN = 5.0
"""A norm that is this many times the usual one has grown."""
ASKED = (
    r"tried to allocate ([\d.]+) bytes",
    r"Tried to allocate ([\d.]+ [KMGT]i?B)",
    r"Unable to allocate ([\d.]+ [KMGT]i?B)",
)
CAPACITY = r"total capacity of ([\d.]+ [KMGT]i?B)"
UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """Strategies that need less memory than the one that ran out of it."""

    now_bytes: dict[str, int]
    """What the strategy needs of a rank, by kind."""
    libraries_bytes: int
    """What a process holds before it has a model."""
    smaller: tuple[tuple[str, int], ...]


Measure = Callable[[Run], "Fitting | None"]


def why_failed(run: Run, fitting: Measure = lambda run: None) -> list[str]:
    """Lines about a failure: what happened, and what to change. None where it did not fail."""
    reason = run.reason or ""
    lower = reason.lower()
    if run.status == "running":
        return ["The record has no end: the run goes on, or its processes were killed. `--resume` goes on."]
    if not reason:
        return []
    for words, explain in KINDS:
        if any(word in lower for word in words):
            return explain(run, fitting)
    return []


def _memory(run: Run, fitting: Measure) -> list[str]:
    asked = next((match[1] for pattern in ASKED if (match := re.search(pattern, run.reason or ""))), None)
    capacity = re.search(CAPACITY, run.reason or "")
    limit = _bytes(capacity[1]) if capacity else run.summary.get("memory_limit_bytes")
    peak = run.summary.get("memory_bytes") or run.memory_bytes
    lines = ["Memory ran out." if asked else "Memory ran out, or the process was killed."]
    if asked:
        lines[0] += f" The allocation that failed was {_gb(_bytes(asked))}"
        lines[0] += f"; this rank had held {_gb(peak)} at most." if peak else "."
    found = fitting(run)
    if found is None:
        return [*lines, "Shard more (zero=3), recompute('full'), or use more micro-batches (accumulate(k))."]
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in found.now_bytes.items())
    now = sum(found.now_bytes.values()) + found.libraries_bytes
    lines.append(f"{run.strategy} needs {_gb(now)} of a rank: {parts}, libraries {_gb(found.libraries_bytes)}.")
    each = _share(run, limit, own=bool(capacity))
    fits = [(text, size) for text, size in found.smaller if each is None or size + found.libraries_bytes <= each]
    if each is not None:
        lines.append(f"A rank may hold {_gb(each)}.")
    if fits:
        lines.append(
            "What fits: " + "; ".join(f"{text} ({_gb(size + found.libraries_bytes)})" for text, size in fits[:3]) + "."
        )
    elif found.smaller:
        text, size = min(found.smaller, key=lambda row: row[1])
        lines.append(
            f"No single change fits; the least is {text} with {_gb(size + found.libraries_bytes)}: use more ranks."
        )
    return lines


def _share(run: Run, limit: Any, *, own: bool) -> float | None:
    """Of one rank, where ranks share the host's memory."""
    if limit is None:
        from shoal.launch.devices import memory_limit_bytes

        limit = memory_limit_bytes()
    return float(limit) if own else float(limit) / max(1, run.world)


def _not_finite(run: Run, fitting: Measure) -> list[str]:
    rows = [row for row in run.steps if row.get("loss") is not None]
    lines = []
    step = len(run.steps) + 1
    norms = [float(row["grad_norm"]) for row in rows if row.get("grad_norm") is not None]
    if rows:
        usual = statistics.median(norms[-BEFORE:-1]) if len(norms) > 2 else None
        low = min(rows[-BEFORE:], key=lambda row: row["loss"])
        last = rows[-1]
        lines.append(
            f"The loss was {low['loss']:.4g} at step {low['step']} and {last['loss']:.4g} at step {last['step']}, the "
            f"last good one; learning rate there: {_rate(last.get('lr'))}."
        )
        if usual and norms[-1] > GROWN * usual:
            lines.append(
                f"The norm of the gradient grew from {usual:.3g} to {norms[-1]:.3g} before: training diverged. Lower "
                "the learning rate, clip (Job.clip), or warm up."
            )
        elif usual:
            lines.append(
                f"The norm of the gradient was as before ({norms[-1]:.3g}): the cause is in step {step} itself. Look "
                f"at its samples, {_samples(run)} of the order of the data, and at log, sqrt or division."
            )
    else:
        lines.append("The first step failed: look at the model's start, its data, and the loss.")
    advice = "" if any("Lower" in line for line in lines) else "Lower the learning rate, clip (Job.clip), or warm up. "
    return [*lines, f"{advice}The last checkpoint is intact."]


def _rate(value: Any) -> str:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    found = [f"{float(each):.3g}" for each in values if isinstance(each, (int, float)) and math.isfinite(each)]
    return ", ".join(dict.fromkeys(found)) or "unknown"


def _samples(run: Run) -> str:
    """Those of the step that failed, as numbers in the order of the data."""
    if not run.steps:
        return "the first"
    last = run.steps[-1]["samples"]
    before = run.steps[-2]["samples"] if len(run.steps) > 1 else 0
    return f"{last} to {2 * last - before - 1}"


def _hang(run: Run, fitting: Measure) -> list[str]:
    lines = []
    if (rank := run.failure.get("rank")) is not None:
        lines.append(f"The others waited for rank {rank}; the collective and its line are in the reason.")
    if run.failure.get("stack"):
        lines.append("It stood in\n" + str(run.failure["stack"]))
    return [*lines, "Look for a branch that only some ranks take, a lock, or a reader of data that waits."]


def _lost(run: Run, fitting: Measure) -> list[str]:
    return ["A rank ended by itself; its own message stands above. `--resume` goes on from the checkpoint."]


NO_MEMORY = (
    "out of memory",
    "allocate memory",
    "tried to allocate",
    "memoryerror",
    "sigkill",
    "signal 9",
    "unable to allocate",
)
KINDS: tuple[tuple[tuple[str, ...], Callable[[Run, Measure], list[str]]], ...] = (
    (NO_MEMORY, _memory),
    (("no longer finite", "nan", "inf (sum", "norm of the gradient"), _not_finite),
    (("is late", "are late", "no rank has made progress", "different collectives"), _hang),
    (("was lost", "exited", "disconnected", "ended with exit status", "was killed"), _lost),
)


def _bytes(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * 1024 ** UNITS.get(unit[:1], 0)


def _gb(value: Any) -> str:
    size = float(value)
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def measure_fitting(run: Run) -> Fitting | None:
    """What the run's strategy needs, and smaller ones; nothing where its job cannot be read any more."""
    from shoal.launch import RankFailed, run_ranks

    settings = {"arguments": dict(run.arguments), "strategy": run.strategy}
    try:
        found = run_ranks("shoal.comparison.explaining.failures:fitting", settings, ranks=1, hang_after_s=120)[0]
    except RankFailed:
        return None
    return Fitting(
        now_bytes=found["now"], libraries_bytes=found["libraries"], smaller=tuple((s, n) for s, n in found["smaller"])
    )


def fitting(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In one process that holds no parameters."""
    import resource

    from shoal.calibration.job_model import job_model, plane_cuts_of
    from shoal.estimate.steps.memory import memory_split, smaller
    from shoal.runtime.setup import job_from
    from shoal.strategy import parse
    from shoal.training.options import TrainOptions

    libraries = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    job = job_from(TrainOptions.from_json({k: v for k, v in settings["arguments"].items() if v is not None}))
    strategy = parse(settings["strategy"])
    model, facts = job_model(job, planes=plane_cuts_of([strategy]))
    return {
        "now": memory_split(model, strategy),
        "libraries": libraries,
        "smaller": [[str(each), size] for each, size in smaller(model, facts, strategy)],
    }
