"""Why two runs differ: what was set differently, what of a step takes longer, and where their losses part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.comparison.explaining.evidence import rank_times
from shoal.training.record.run import Run

WITHOUT = ("folder", "resume", "go_on", "keep", "log", "gate", "checkpoint_every", "checkpoint_async", "keep_best")
"""Options that change no step."""
APART = 2e-3
"""Relative difference of losses that rounding does not make in a few steps."""


def differences(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """What the second run's step takes longer for, seconds, the largest difference first. Of `summary["ranks"]`."""
    sides = []
    for rows in (first, second):
        times = rank_times(rows)
        if not times:
            return []
        wait = min(each.wait_s for each in times) if len(times) > 1 else 0.0
        sides.append(
            {
                "the step": statistics.fmean(each.wall_s for each in times),
                "communication": wait,
                "waiting for late ranks": statistics.fmean(each.wait_s for each in times) - wait,
                "reading data": statistics.fmean(each.data_s for each in times),
                "the forward": statistics.fmean(each.forward_s for each in times),
                "backward, update and the rest": statistics.fmean(max(0.0, t.own_s - t.forward_s) for t in times),
            }
        )
    total, *parts = [(name, sides[1][name] - sides[0][name]) for name in sides[0]]
    return [total, *sorted(parts, key=lambda row: -abs(row[1]))]


def settings(first: Run, second: Run) -> list[tuple[str, str, str]]:
    """(what, in the first run, in the second) for all that was set differently and may change a step."""
    found = [
        ("job", first.job, second.job),
        ("strategy", first.strategy, second.strategy),
        ("ranks", str(first.world), str(second.world)),
        ("seed", str(first.seed), str(second.seed)),
    ]
    found += [
        (f"--{name.replace('_', '-')}", _word(first.arguments.get(name)), _word(second.arguments.get(name)))
        for name in sorted({*first.arguments, *second.arguments})
        if name not in (*WITHOUT, "job", "strategy", "seed")
    ]
    found.append(("samples in a step", _batch(first), _batch(second)))
    for name in sorted({*first.environment, *second.environment} - {"links"}):
        found.append((name, _word(first.environment.get(name)), _word(second.environment.get(name))))
    found += [
        ("sent in a step", f"{first.ledger.bytes / 1e6:.4g} MB", f"{second.ledger.bytes / 1e6:.4g} MB"),
        ("collectives in a step", str(first.ledger.calls), str(second.ledger.calls)),
    ]
    return [row for row in found if row[1] != row[2]]


CAUSES = {
    "communication": ("sent in a step", "collectives in a step", "--emulate", "--bucket-mb", "backend", "strategy"),
    "waiting for late ranks": ("--straggler", "strategy", "ranks"),
    "reading data": ("--prefetch", "--loader-threads", "job", "samples in a step"),
    "the forward": ("samples in a step", "strategy", "job", "threads"),
    "backward, update and the rest": ("samples in a step", "strategy", "job", "threads"),
}
"""Part of a step -> what may be set that changes it, the likeliest first."""
NONE = 0.02
"""A difference below this part of a step is none."""


def in_words(parts: Sequence[tuple[str, float]], changed: Sequence[tuple[str, str, str]], step_s: float) -> str:
    """Why one step takes longer than another, in a sentence."""
    if not parts:
        return ""
    total, (name, seconds) = parts[0][1], max(parts[1:], key=lambda row: row[1] * (1 if parts[0][1] > 0 else -1))
    if abs(total) < NONE * step_s:
        return "Their steps take as long."
    found = {what: (here, there) for what, here, there in changed}
    known = [f"{what} {found[what][0]} and {found[what][1]}" for what in CAUSES[name] if what in found][:3]
    side = "second" if total > 0 else "first"
    why = ", though nothing that changes it was set differently: the machine was busier"
    if known:
        why = f": {', '.join(known)}"
    return (
        f"A step of the {side} takes {1000 * abs(total):.3g} ms longer, {1000 * abs(seconds):.3g} ms of it "
        f"{'in ' if name == 'communication' else ''}{name}{why}."
    )


def parting(first: Run, second: Run) -> str:
    """Where the losses of two runs part, in a sentence."""
    pairs = list(zip(first.losses, second.losses, strict=False))
    if not pairs:
        return ""
    for step, (one, other) in enumerate(pairs, start=1):
        if not abs(one - other) <= APART * max(abs(one), 1e-6):
            if step == 1:
                why = "other weights, samples, batch or loss"
            else:
                why = f"the first {step - 1} agree, so the start is the same, and the updates are not"
            return f"Their losses part at step {step}, {one:.5g} and {other:.5g}: {why}."
    return f"Their losses agree in all {len(pairs)} steps that both made."


def _batch(run: Run) -> str:
    return str(run.steps[0]["samples"]) if run.steps else "unknown"


def _word(value: Any) -> str:
    return "-" if value in (None, [], {}) else str(value)
