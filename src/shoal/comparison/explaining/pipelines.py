"""Why the ranks of a pipeline wait: unequal stages, the schedule's bubble, and messages.

The schedule is simulated twice with what the stages took in this run: as they are, and with equal ones. The difference
is the imbalance; what ranks still wait in the second is the bubble; what the step took longer than the first is
messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from shoal.comparison.explaining.evidence import Cause, Evidence, RankTimes, ms
from shoal.estimate.pipeline.spans import Pipelines, spans_s
from shoal.strategy import pp


def stages(run: Evidence, term: pp) -> list[Cause]:
    """Imbalance and bubble; last the messages, whose text is not this file's."""
    ranks = by_stage(run, term)
    own = [each.own_s for each in ranks]
    mean, most = statistics.fmean(own), max(own)
    as_is, even = span_s(term, ranks), span_s(term, [_mean(ranks)] * len(ranks))
    late = max(run.ranks, key=lambda each: each.own_s)
    rest = max((each.own_s for each in run.ranks if each is not late), default=0.0)
    text = (
        f"imbalance of the stages: rank {late.rank} works {ms(most)}, the others {ms(rest)} at most; move blocks to "
        "other stages (Job.layout), or let Shoal balance them"
    )
    bubble = f"the bubble of {term}; more micro-batches, or 'zero-bubble'"
    step_s = run.step_s
    return [
        Cause(name="imbalance", text=text, gain_s=max(0.0, as_is - even), step_s=step_s),
        Cause(name="bubble", text=bubble, gain_s=max(0.0, even - mean), step_s=step_s),
        Cause(name="messages", text="", gain_s=max(0.0, min(run.wait_s, step_s - as_is)), step_s=step_s),
    ]


def by_stage(run: Evidence, term: pp) -> list[RankTimes]:
    """One rank for each place in the pipeline: the slowest of its replicas."""
    return [max(group, key=lambda each: each.own_s) for group in replicas(run, term)]


def late_replica(run: Evidence, term: pp) -> list[Cause]:
    """A rank that is later than the others with the same stage."""
    gains = [
        (late.own_s - statistics.fmean(each.own_s for each in group if each is not late), late.rank)
        for group in replicas(run, term)
        if len(group) > 1
        for late in [max(group, key=lambda each: each.own_s)]
    ]
    if not gains:
        return []
    gain, rank = max(gains)
    text = f"waiting for rank {rank}, which works {ms(gain)} longer than the others with its stage; give it a free core"
    return [Cause(name="late-rank", text=text, gain_s=gain, step_s=run.step_s)]


def replicas(run: Evidence, term: pp) -> list[list[RankTimes]]:
    """The ranks of each place in the pipeline."""
    axes = run.strategy.axes if run.strategy else ()
    at = next((place for place, axis in enumerate(axes) if axis.term is term), 0)
    after = int(np.prod([axis.size for axis in axes[at + 1 :]], dtype=int))
    found: dict[int, list[RankTimes]] = {}
    for each in run.ranks:
        found.setdefault(each.rank // after % term.n, []).append(each)
    return [found[place] for place in sorted(found)]


def span_s(term: pp, ranks: Sequence[RankTimes]) -> float:
    """Seconds of a step under the schedule, if each stage takes what its rank took, and messages nothing."""
    if term.schedule == "pipedream" or len(ranks) != term.n:
        return max(each.own_s for each in ranks)  # It is never flushed: the slowest stage sets the pace.
    parts = term.micro * term.chunks
    forward = [min(each.forward_s, each.own_s) / parts for each in ranks]
    backward = [max(0.0, each.own_s - each.forward_s) / parts for each in ranks]
    columns = [np.repeat(np.array(each), 1)[:, None] for each in (_by_chunk(forward, term), _by_chunk(backward, term))]
    [span] = spans_s(
        [
            Pipelines(
                schedule=term.schedule,
                ranks=term.n,
                chunks=term.chunks,
                micro=term.micro,
                forward_s=columns[0],
                backward_s=columns[1],
                weight_s=columns[1] / 2,
                message_s=np.zeros(1),
            )
        ]
    )
    return float(span[0])


def _by_chunk(of_rank: Sequence[float], term: pp) -> list[float]:
    """Costs of the stages, in their order."""
    from shoal.strategy.schedule import stage_rank

    return [of_rank[stage_rank(stage, term.n, term.chunks, term.schedule)] for stage in range(term.n * term.chunks)]


def _mean(ranks: Sequence[RankTimes]) -> RankTimes:
    names = ("wall_s", "wait_s", "data_s", "forward_s", "cpu_s")
    return RankTimes(0, *(statistics.fmean(getattr(each, name) for each in ranks) for name in names))
