"""The guard: whether a contestant trained the same job as the reference. What it compares was seen by the protocol, not
reported by the contestant. Each finding has a name.

    breach      the pair is unfair: the contestant did something else than it was asked for
    departure   the technique itself is another algorithm (local steps, compression); it is judged by its loss alone
    worse       the loss is above the reference's band over seeds
    too-well    the loss is below it: something was not the same

Bands follow MLPerf's reference convergence points: a one-sided t-test over seeds, in either direction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["breach", "departure", "worse", "too-well"]

FOLLOWED_STEPS = 5
"""First steps in which an exact contestant has to follow the reference's loss."""
FOLLOWED = 2e-3
"""Relative: float32 rounding stays far below it in a few steps, a skipped all-reduce or layer does not."""
BAND = 0.02
"""A difference of the mean loss below this part of it is none, however certain."""
SIGNIFICANCE = 0.01
SLOW_STEP = 6.0
"""A step that takes this many times the median, at the same place in every run, holds a compilation or a warm-up."""
SLOWEST_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    kind: Kind
    text: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One run, as the guard sees it."""

    seed: int
    losses: Sequence[float]
    step_s: Sequence[float]
    ranks: Sequence[Mapping[str, Any]]
    """Facts of each rank (`watch.py`)."""


def judge(
    runs: Sequence[Seen],
    references: Sequence[Seen],
    *,
    exact: bool,
    follows: bool,
    warmup: int,
    reads_alike: bool = True,
) -> list[Finding]:
    """All findings of one contestant on one number of ranks.

    Args:
        runs: Its runs, one for each seed.
        references: The reference's runs.
        exact: Whether it claims the numbers of the serial run.
        follows: Whether its first losses can be compared step by step.
        warmup: First steps that are outside of the window of speed.
        reads_alike: Whether all its ranks make the same steps, so that samples have a step.
    """
    found: list[Finding] = []
    by_seed = {each.seed: each for each in references}
    for run in runs:
        reference = by_seed.get(run.seed)
        if reference is None:
            continue
        if reads_alike:
            found += _samples(run, reference)
        found += _parameters(run, reference)
        found += _optimizers(run, reference)
        if exact:
            found += _replicas(run)
        if exact and follows:
            found += _first_losses(run, reference)
        found += _compiled(run, warmup)
    found += _slow_steps(runs, warmup)
    found += _band(runs, references)
    return list({each.name: each for each in reversed(found)}.values())[::-1]


def _samples(run: Seen, reference: Seen) -> list[Finding]:
    """Every step reads the reference's samples, each as often as the others."""
    expected = reference.ranks[0]["samples"]
    read = [each["samples"] for each in run.ranks if "samples" in each]
    for step, (due, due_sum) in enumerate(expected):
        rows = [each[step] for each in read if step < len(each)]
        count, total = sum(row[0] for row in rows), sum(int(row[1]) for row in rows) % (1 << 64)
        if due and count % due == 0 and count:
            if total == (count // due) * int(due_sum) % (1 << 64):
                continue
            return [_breach("samples", f"step {step + 1} of seed {run.seed} reads other samples than the reference")]
        return [
            _breach("global-batch", f"step {step + 1} of seed {run.seed} reads {count} samples, the reference {due}")
        ]
    return []


def _parameters(run: Seen, reference: Seen) -> list[Finding]:
    """The parameters before the first step are the reference's, to the bit."""
    due, found = reference.ranks[0].get("start"), run.ranks[0].get("start") if run.ranks else None
    if due is None or found is None:
        return []
    lost, new = sorted(due.keys() - found.keys()), sorted(found.keys() - due.keys())
    if lost or new:
        text = f"{len(lost)} parameters are missing ({', '.join(lost[:3])})" if lost else f"{new[0]} is not in the job"
        return [_breach("model", text)]
    shapes = [name for name in due if due[name][0] != found[name][0]]
    if shapes:
        return [_breach("precision", f"{shapes[0]} is {found[shapes[0]][0]}, in the reference {due[shapes[0]][0]}")]
    differing = [name for name in due if due[name] != found[name]]
    if differing:
        count = f"{len(differing)} of {len(due)} parameters"
        return [_breach("initial-parameters", f"{count} differ before step 1 of seed {run.seed} ({differing[0]})")]
    return []


def _optimizers(run: Seen, reference: Seen) -> list[Finding]:
    due = _kinds(reference.ranks[0]["optimizers"])
    found = _kinds([each for rank in run.ranks for each in rank.get("optimizers", ())])
    if not due or not found:
        return []
    problems = []
    state = {dtype for each in found.values() for dtype in each["state"]}
    expected = {dtype for each in due.values() for dtype in each["state"]}
    if state - expected:
        problems.append(
            _breach(
                "optimizer-state",
                f"optimiser state is {', '.join(sorted(state))}, in the reference {', '.join(sorted(expected))}",
            )
        )
    extra, missing = sorted(found.keys() - due.keys()), sorted(due.keys() - found.keys())
    if extra and not missing:
        problems.append(_breach("outer-optimizer", f"{extra[0]} steps as well, which the reference has not"))
    elif extra:
        problems.append(_breach("optimizer", f"{extra[0]} steps, in the reference {missing[0]}"))
    return problems


def _kinds(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Optimisers that differ in class or options. Options of several groups are one kind."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        shared = {name: value for group in row["options"] for name, value in group.items() if name != "weight_decay"}
        # Ranks may hold parameters of one group only, so decay is compared over all of them by the first losses.
        words = ", ".join(f"{name}={value}" for name, value in sorted(shared.items()) if name not in ("amsgrad",))
        entry = found.setdefault(f"{row['class']}({words})", {"state": set()})
        entry["state"] |= set(row["state"])
    return found


def _replicas(run: Seen) -> list[Finding]:
    """All ranks end with the same parameters."""
    ends = [each["end"] for each in run.ranks if each.get("end")]
    differing = [name for name in (ends[0] if ends else ()) if any(end.get(name) != ends[0][name] for end in ends)]
    if not differing:
        return []
    count = f"{len(differing)} of {len(ends[0])} parameters"
    text = f"{count} differ between ranks at the end of seed {run.seed}: gradients are not reduced"
    return [_breach("replicas", text)]


def _first_losses(run: Seen, reference: Seen) -> list[Finding]:
    pairs = zip(run.losses[:FOLLOWED_STEPS], reference.losses[:FOLLOWED_STEPS], strict=False)
    for step, (loss, due) in enumerate(pairs, start=1):
        if not abs(loss - due) <= FOLLOWED * max(abs(due), 1e-6):
            what = "another model, loss or batch" if step == 1 else "another update"
            return [
                _breach(
                    "first-losses",
                    f"the loss of step {step} is {loss:.5f}, the reference's {due:.5f} (seed {run.seed}): "
                    f"it computes {what}",
                )
            ]
    return []


def _compiled(run: Seen, warmup: int) -> list[Finding]:
    for rank in run.ranks:
        counts = rank.get("compiled", [])
        for step in range(warmup + 1, len(counts)):
            if counts[step] > counts[step - 1]:
                return [_breach("compilation", f"step {step} compiles, inside the window that is timed")]
    return []


def _slow_steps(runs: Sequence[Seen], warmup: int) -> list[Finding]:
    """A step that is many times slower in every run is the contestant's, not the machine's."""
    slow: set[int] | None = None
    for run in runs:
        window = run.step_s[warmup:]
        if len(window) < 4 or len(runs) < 2:
            return []
        usual = statistics.median(window)
        late = {n + warmup + 1 for n, s in enumerate(window) if s > max(SLOW_STEP * usual, usual + SLOWEST_S)}
        slow = late if slow is None else slow & late
    if slow:
        step = min(slow)
        text = f"step {step} takes more than {SLOW_STEP:g} times the median in every run, inside the window"
        return [_breach("compilation", text)]
    return []


def _band(runs: Sequence[Seen], references: Sequence[Seen]) -> list[Finding]:
    ours, theirs = [_final(each) for each in runs], [_final(each) for each in references]
    if not ours or not theirs:
        return []
    if any(not math.isfinite(each) for each in ours):
        return [Finding(name="loss", kind="worse", text="the loss is not finite")]
    gap = statistics.fmean(ours) - statistics.fmean(theirs)
    if abs(gap) <= BAND * abs(statistics.fmean(theirs)):
        return []
    p = one_sided(ours, theirs)
    # One seed has no spread; then the gap alone decides, at five times the band.
    if (p is not None and p > SIGNIFICANCE) or (p is None and abs(gap) <= 5 * BAND * abs(statistics.fmean(theirs))):
        return []
    how = f"p = {p:.1g} over {len(ours)} seeds" if p is not None else "one seed, no test"
    text = f"the final loss is {statistics.fmean(ours):.4f}, the reference's {statistics.fmean(theirs):.4f} ({how})"
    if gap > 0:
        return [Finding(name="loss-band", kind="worse", text=text)]
    return [Finding(name="too-well", kind="too-well", text=text + ": something was not the same")]


def _final(run: Seen) -> float:
    """The mean loss of the last quarter."""
    tail = run.losses[-max(1, len(run.losses) // 4) :]
    return statistics.fmean(tail) if tail else math.nan


def one_sided(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Welch's t-test that the means differ in the direction that they do; None without a spread."""
    if min(len(ours), len(theirs)) < 2:
        return None
    a, b = statistics.variance(ours) / len(ours), statistics.variance(theirs) / len(theirs)
    if a + b == 0:
        return 0.0
    t = abs(statistics.fmean(ours) - statistics.fmean(theirs)) / math.sqrt(a + b)
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1))
    return student_tail(t, freedom)


def student_tail(t: float, freedom: float, *, pieces: int = 2000) -> float:
    """P(T > t) of Student's t, by Simpson's rule over the angle (t = sqrt(freedom) tan(angle))."""
    start, stop = math.atan(t / math.sqrt(freedom)), math.pi / 2
    width = (stop - start) / pieces
    log_norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(math.pi)

    def density(angle: float) -> float:
        return max(math.cos(angle), 0.0) ** (freedom - 1) if freedom > 1 or math.cos(angle) > 0 else 1.0

    total = sum((1 if n in (0, pieces) else 4 if n % 2 else 2) * density(start + n * width) for n in range(pieces + 1))
    return min(0.5, math.exp(log_norm) * total * width / 3)


def _breach(name: str, text: str) -> Finding:
    return Finding(name=name, kind="breach", text=text)
