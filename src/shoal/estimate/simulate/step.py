"""The event simulation of a step: who computes what when, for all classes of replicas at once.

The order in which ranks act is the schedule's, and does not depend on how long anything takes; so one walk along it
(`pipeline/simulate.clock`) finds the times of every class, as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.estimate.pipeline.simulate import PipelineTimeline, causal_order, clock, laned
from shoal.estimate.simulate.costs import StepCosts
from shoal.estimate.simulate.disturb import CALM, Disturbance, Factors, factors
from shoal.strategy.schedule import Action, actions, stage_rank
from shoal.strategy.terms import pp

Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One simulated step."""

    costs: StepCosts
    counts: NDArray[np.int64]
    """Replicas in each class."""
    order: Sequence[tuple[int, Action]]
    """(rank along the pipeline, what it computes), causes before effects."""
    starts_s: Times
    """Actions x classes: when the computing of each begins."""
    stops_s: Times
    passed_s: Times
    """Ranks along the pipeline x classes: when the last pass and its message are over."""
    reduced_s: Times
    """Ranks along the pipeline: when their gradients are summed and their weights are new, in the slowest island."""
    island_s: Times
    """The step of each island."""
    step_s: float
    """How much later the last island is done than it was before; all of them wait for an average."""

    @property
    def idle(self) -> float:
        """The part of all ranks' time, until the last of them has done its passes, in which they do not compute."""
        busy = np.zeros_like(self.passed_s)
        for (rank, _), start, stop in zip(self.order, self.starts_s, self.stops_s, strict=True):
            busy[rank] += stop - start
        span = float(self.passed_s.max())
        return float(1 - (busy.mean(axis=0) * self.counts).sum() / (span * self.counts.sum()))

    def timeline(self, which: int = 0) -> PipelineTimeline:
        """One class of replicas in the form that `pictures/timeline.py` draws."""
        term = self.costs.term
        starts_s, stops_s = self.starts_s[:, which].tolist(), self.stops_s[:, which].tolist()
        return laned(self.order, starts_s, stops_s, ranks=term.n, chunks=term.chunks, schedule=term.schedule)


def simulate_step(costs: StepCosts, disturbance: Disturbance = CALM, *, step: int = 0) -> Step:
    """One step; of islands, one between two averages."""
    return _simulated(costs, factors(costs, disturbance, step=step), _order(costs.term))


def simulate_steps(costs: StepCosts, disturbance: Disturbance = CALM, *, steps: int) -> Iterator[Step]:
    """Several steps. All ranks of an island wait for all between them (gradients are clipped by their global norm);
    islands wait for each other when they are averaged."""
    order = _order(costs.term)
    quiet, slower = None, 1.0
    clocks = np.zeros(costs.islands)
    for step in range(steps):
        if disturbance.varies or quiet is None:
            found = factors(costs, disturbance, step=step)
            quiet, slower = _simulated(costs, found, order), float(found.data.max())
        before = clocks.max()
        clocks = clocks + quiet.island_s
        if (step + 1) % costs.period == 0:
            clocks[:] = clocks.max() + costs.average_s * slower * (1 + costs.waits)
        yield replace(quiet, step_s=float(clocks.max() - before))


def _order(term: pp) -> list[tuple[int, Action]]:
    return causal_order(actions(term), _homes(term))


def _homes(term: pp) -> list[int]:
    return [stage_rank(stage, term.n, term.chunks, term.schedule) for stage in range(term.n * term.chunks)]


def _simulated(costs: StepCosts, slower: Factors, order: Sequence[tuple[int, Action]]) -> Step:
    homes = _homes(costs.term)
    seconds = {
        "F": costs.forward_s,
        "BW": costs.backward_s,
        "W": costs.weight_s,
        "B": [full - part for full, part in zip(costs.backward_s, costs.weight_s, strict=True)],
    }
    spans = {
        kind: [each * slower.compute[:, homes[stage]] for stage, each in enumerate(row)]
        for kind, row in seconds.items()
    }
    message, begin = costs.message_s * slower.message, np.zeros(len(slower.counts))
    starts, stops, free = clock(order, homes, spans, message, begin_s=begin, later=np.maximum)
    passed = np.stack(free)
    # Gradients of one stage are summed over an island; all of its ranks wait for all before the next step.
    ends = np.where(slower.inside[:, None, :], passed, 0.0).max(axis=2)
    reduced = ends + (costs.data_s * slower.data)[:, None] + costs.optimizer_s
    island_s = reduced.max(axis=1) * (1 + costs.waits) + costs.fixed_s
    slowest = int(island_s.argmax())
    return Step(
        costs=costs,
        counts=slower.counts,
        order=order,
        starts_s=np.array(starts),
        stops_s=np.array(stops),
        passed_s=passed,
        reduced_s=reduced[slowest],
        island_s=island_s,
        step_s=float(island_s[slowest]),
    )
