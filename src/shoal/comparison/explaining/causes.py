"""What held a run back: causes, each with the seconds of a step that removing it would save, the largest first.

The rank that waits least is not waited for: its wait is communication (or a pipeline's bubble), and what it works
longer than the others is why they wait. So communication and late ranks are told apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.comparison.explaining.batch import small_batch, unneeded_recompute
from shoal.comparison.explaining.evidence import Cause, Evidence, evidence, ms
from shoal.comparison.explaining.links import sent
from shoal.comparison.explaining.pipelines import late_replica, stages
from shoal.strategy import pp

__all__ = ["Cause", "causes", "causes_of"]

LEAST = 0.02
"""A part of the step below which nothing is named."""


def causes(strategy: str, ranks: Sequence[Mapping[str, Any]], **known: Any) -> list[Cause]:
    """The causes, the most costly first.

    Args:
        strategy: The run's strategy.
        ranks: `summary["ranks"]` of its record.
        known: What else is known of the run (`evidence`).
    """
    return causes_of(evidence(strategy, ranks, **known))


def causes_of(run: Evidence) -> list[Cause]:
    if not run.ranks:
        return []
    pipeline = run.strategy.term(pp) if run.strategy is not None else None
    waiting = stages(run, pipeline) if pipeline is not None and len(run.ranks) > 1 else _late(run)
    # What a schedule makes ranks wait is no communication.
    wait_s = waiting[-1].gain_s if pipeline is not None and waiting else run.wait_s
    late = late_replica(run, pipeline) if pipeline is not None else []
    found = [*late, *(waiting[:-1] if pipeline is not None else waiting), *_data(run), *unneeded_recompute(run)]
    found += [*sent(run, wait_s), *small_batch(run, wait_s), *_off_core(run)]
    found = [each for each in found if each.share >= LEAST]
    return sorted(found, key=lambda each: -each.gain_s)


def _late(run: Evidence) -> list[Cause]:
    """A rank that the others wait for."""
    if len(run.ranks) < 2:
        return []
    late = max(run.ranks, key=lambda each: each.own_s)
    others = statistics.fmean(each.own_s for each in run.ranks if each is not late)
    text = (
        f"waiting for rank {late.rank}, which works {ms(late.own_s)}, the others {ms(others)}; "
        "give it a free core, or loosen the steps: sync=ssp(s), softsync(k) or local(h)"
    )
    return [Cause(name="late-rank", text=text, gain_s=late.own_s - others, step_s=run.step_s)]


def _data(run: Evidence) -> list[Cause]:
    slowest = max(run.ranks, key=lambda each: each.data_s)
    where = f"reading data ({ms(slowest.data_s)} on rank {slowest.rank})"
    text = f"{where}; read it ahead (--prefetch 2), cache it, or make batch() cheaper"
    return [Cause(name="data", text=text, gain_s=slowest.data_s, step_s=run.step_s)]


def _off_core(run: Evidence) -> list[Cause]:
    """A thread that neither waits for messages nor has a core: other programs run, or it sleeps. Where one rank alone
    is late this is its lateness already."""
    gain = min(max(0.0, each.own_s - each.cpu_s) for each in run.ranks)
    text = f"time in which ranks had no core ({ms(gain)}): other programs, or more threads than cores"
    return [Cause(name="off-core", text=text, gain_s=gain, step_s=run.step_s)]
