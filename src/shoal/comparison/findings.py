"""What held a run back: from its record to findings, each with the seconds of a step that removing it would save.

The record has, for every rank, the median of a step and what of it was waiting for communication, reading data, the
forward and the rest. The rank that waits least is not waited for: its wait is communication (or a pipeline's bubble),
and what it works longer than the others is why they wait. So communication and late ranks are told apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.strategy import Strategy, StrategyError, parse, pp, recompute

LEAST = 0.02
"""A part of the step below which nothing is named."""
FASTER_LINK = 4.0


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that held a run back."""

    name: str
    """late-rank, imbalance, communication, bubble, data, recompute, off-core or computing."""
    text: str
    gain_s: float
    """Seconds of a step that are saved without it."""
    step_s: float

    @property
    def share(self) -> float:
        """Of the step."""
        return self.gain_s / self.step_s if self.step_s else 0.0

    @property
    def line(self) -> str:
        """In one line."""
        return f"{self.share:.0%} of the step is {self.text}"


@dataclass(frozen=True)
class RankTimes:
    """The median step of one rank."""

    rank: int
    wall_s: float
    wait_s: float
    data_s: float
    forward_s: float
    cpu_s: float

    @property
    def own_s(self) -> float:
        """What it does itself, data left out."""
        return max(0.0, self.wall_s - self.wait_s - self.data_s)

    @property
    def busy_s(self) -> float:
        return self.wall_s - self.wait_s


def rank_times(rows: Sequence[Mapping[str, Any]]) -> list[RankTimes]:
    """Of the ranks that made steps."""
    return [
        RankTimes(rank, *(float(row[name]) for name in ("wall_s", "wait_s", "data_s", "forward_s", "cpu_s")))
        for rank, row in enumerate(rows)
        if row
    ]


def causes(strategy_text: str, ranks: Sequence[Mapping[str, Any]], *, sent_bytes: int | None = None) -> list[Cause]:
    """The causes, the most costly first.

    Args:
        strategy_text: The run's strategy.
        ranks: `summary["ranks"]` of its record.
        sent_bytes: What a rank sends in a step, for the speed of its links.
    """
    times = rank_times(ranks)
    if not times:
        return []
    strategy = _strategy(strategy_text)
    step_s = statistics.fmean(each.wall_s for each in times)
    found = [*_late(times, strategy, step_s), *_data(times, step_s), *_recompute(times, strategy, step_s)]
    found += _communication(times, strategy, step_s, sent_bytes)
    found += _off_core(times, step_s)
    found = [each for each in found if each.share >= LEAST]
    return sorted(found, key=lambda each: -each.gain_s)


def _strategy(text: str) -> Strategy | None:
    try:
        return parse(text)
    except StrategyError:
        return None


def _late(times: Sequence[RankTimes], strategy: Strategy | None, step_s: float) -> list[Cause]:
    """A rank that the others wait for. In a pipeline stages have different work, and moving it evens them out."""
    if len(times) < 2:
        return []
    late = max(times, key=lambda each: each.own_s)
    others = [each.own_s for each in times if each is not late]
    pipeline = strategy.term(pp) if strategy is not None else None
    if pipeline is not None:
        gain = late.own_s - statistics.fmean(each.own_s for each in times)
        rest = f"the others {_ms(max(others))} at most"
        stage = f"imbalance of the stages: rank {late.rank} works {_ms(late.own_s)}, {rest}"
        advice = "; move blocks to other stages (Job.layout), or let Shoal balance them"
        return [Cause(name="imbalance", text=stage + advice, gain_s=gain, step_s=step_s)]
    gain = late.own_s - statistics.fmean(others)
    text = (
        f"waiting for rank {late.rank}, which works {_ms(late.own_s)}, the others {_ms(statistics.fmean(others))}; "
        "give it a free core, or loosen the steps: sync=ssp(s), softsync(k) or local(h)"
    )
    return [Cause(name="late-rank", text=text, gain_s=gain, step_s=step_s)]


def _data(times: Sequence[RankTimes], step_s: float) -> list[Cause]:
    slowest = max(times, key=lambda each: each.data_s)
    where = f"reading data ({_ms(slowest.data_s)} on rank {slowest.rank})"
    text = f"{where}; read it ahead (--prefetch 2), cache it, or make batch() cheaper"
    return [Cause(name="data", text=text, gain_s=slowest.data_s, step_s=step_s)]


def _recompute(times: Sequence[RankTimes], strategy: Strategy | None, step_s: float) -> list[Cause]:
    term = strategy.term(recompute) if strategy is not None else None
    if term is None or str(term) != str(recompute("full")):
        return []
    gain = max(each.forward_s for each in times)
    text = f"computing the forward again ({_ms(gain)}); leave {term} out if the activations fit"
    return [Cause(name="recompute", text=text, gain_s=gain, step_s=step_s)]


def _communication(
    times: Sequence[RankTimes], strategy: Strategy | None, step_s: float, sent_bytes: int | None
) -> list[Cause]:
    """The wait of the rank that waits least; of a pipeline the part that its schedule makes is the bubble."""
    if len(times) < 2:
        return []
    wait = min(each.wait_s for each in times)
    found, pipeline = [], strategy.term(pp) if strategy is not None else None
    if pipeline is not None:
        from shoal.estimate.pipeline.simulate import bubble_formula

        part = min(wait, (bubble_formula(pipeline) or 0.0) * step_s)
        text = f"the bubble of {pipeline}; more micro-batches, or 'zero-bubble'"
        found.append(Cause(name="bubble", text=text, gain_s=part, step_s=step_s))
        wait -= part
    speed = f": {sent_bytes / 1e6:.3g} MB at {sent_bytes / wait / 1e6:.3g} MB/s" if sent_bytes and wait > 0 else ""
    quarter = f"a link {FASTER_LINK:g} times as fast saves {_ms(wait * (1 - 1 / FASTER_LINK))} of a step"
    text = f"communication that nothing hides{speed}; {quarter}, compress=... or sync=local(h) send less"
    return [*found, Cause(name="communication", text=text, gain_s=wait, step_s=step_s)]


def _off_core(times: Sequence[RankTimes], step_s: float) -> list[Cause]:
    """A thread that neither waits for messages nor has a core: other programs run, or it sleeps. Where one rank alone
    is late this is its lateness already."""
    gain = min(max(0.0, each.own_s - each.cpu_s) for each in times)
    text = f"time in which ranks had no core ({_ms(gain)}): other programs, or more threads than cores"
    return [Cause(name="off-core", text=text, gain_s=gain, step_s=step_s)]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def differences(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """What the second run's step takes longer for, seconds, the largest difference first."""
    sides = []
    for rows in (first, second):
        times = rank_times(rows)
        if not times:
            return []
        wait = min(each.wait_s for each in times)
        sides.append({
            "the step": statistics.fmean(each.wall_s for each in times),
            "communication": wait,
            "waiting for late ranks": statistics.fmean(each.wait_s for each in times) - wait,
            "reading data": statistics.fmean(each.data_s for each in times),
            "the forward": statistics.fmean(each.forward_s for each in times),
            "backward, update and the rest": statistics.fmean(max(0.0, t.own_s - t.forward_s) for t in times),
        })  # fmt: skip
    total, *parts = [(name, sides[1][name] - sides[0][name]) for name in sides[0]]
    return [total, *sorted(parts, key=lambda row: -abs(row[1]))]


ENDINGS = (
    (("no longer finite", "nan", "inf (sum", "norm of the gradient"),
     "A number was not finite. Lower the learning rate, clip (Job.clip), or warm up; the last checkpoint is intact."),
    (("out of memory", "cannot allocate", "memoryerror", "sigkill", "signal 9"),
     "Memory ran out, or the process was killed. Shard more (zero=3), recompute('full'), or use more micro-batches "
     "(accumulate(k)); `shoal plan JOB` prints the memory of each strategy."),
    (("no rank has made progress", "is at "),
     "Ranks waited for each other. The rank that is named is the one to look at; its line of code is in the reason."),
    (("was lost", "exited", "disconnected"),
     "A rank ended by itself; its own message stands above the first echo. `--resume` goes on from the checkpoint."),
)  # fmt: skip


def why_failed(reason: str) -> str:
    """What a run's failure means, and what to do."""
    lower = reason.lower()
    return next((text for words, text in ENDINGS if any(word in lower for word in words)), "")
