"""The discrete-event play of a step: who computes what when, for all classes of replicas at once.

The order in which ranks act is the schedule's, and does not depend on how long anything takes; so one walk along it, in
an order in which causes come before effects, finds the times of every class, as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.estimate.pipeline.play import Box, Played, most_kept
from shoal.estimate.simulate.costs import StepCosts
from shoal.estimate.simulate.disturb import CALM, Disturbance, Factors, factors
from shoal.strategy.schedule import Action, actions, stage_rank

Times = NDArray[np.float64]
Cause = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step played."""

    costs: StepCosts
    counts: NDArray[np.int64]
    """Replicas in each class."""
    order: tuple[tuple[int, Action], ...]
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

    def played(self, which: int = 0) -> Played:
        """One class as the pictures of pipelines want it."""
        term = self.costs.term
        lanes: list[list[Box]] = [[] for _ in range(term.n)]
        starts, stops = self.starts_s[:, which], self.stops_s[:, which]
        for (rank, action), start, stop in zip(self.order, starts, stops, strict=True):
            lanes[rank].append(Box(action=action, start_s=float(start), stop_s=float(stop)))
        makespan_s = float(self.passed_s[:, which].max())
        busy = [sum(box.stop_s - box.start_s for box in lane) for lane in lanes]
        kept = tuple(most_kept([box.action for box in lane]) for lane in lanes)
        return Played(
            schedule=term.schedule, ranks=term.n, chunks=term.chunks, lanes=tuple(tuple(lane) for lane in lanes),
            makespan_s=makespan_s, idle_s=tuple(makespan_s - each for each in busy), in_flight=kept,
        )  # fmt: skip


def play_step(costs: StepCosts, disturbance: Disturbance = CALM, *, step: int = 0) -> Step:
    """One step; of islands, one between two averages."""
    return _played(costs, factors(costs, disturbance, step=step), causal_order(costs))


def play_steps(costs: StepCosts, disturbance: Disturbance = CALM, *, steps: int) -> Iterator[Step]:
    """Several steps. All ranks of an island wait for all between them (gradients are clipped by their global norm);
    islands wait for each other when they are averaged."""
    order = causal_order(costs)
    quiet, slower = None, 1.0
    clocks = np.zeros(costs.islands)
    for step in range(steps):
        if disturbance.noise or quiet is None:
            found = factors(costs, disturbance, step=step)
            quiet, slower = _played(costs, found, order), float(found.data.max())
        before = clocks.max()
        clocks = clocks + quiet.island_s
        if (step + 1) % costs.period == 0:
            clocks[:] = clocks.max() + costs.average_s * slower * (1 + costs.waits)
        yield replace(quiet, step_s=float(clocks.max() - before))


def causal_order(costs: StepCosts) -> tuple[tuple[int, Action], ...]:
    """All actions, each after what it waits for."""
    term = costs.term
    lanes = actions(term)
    stages = term.n * term.chunks
    done: set[Cause] = set()
    asleep: dict[Cause, list[int]] = {}
    at = [0] * term.n
    found: list[tuple[int, Action]] = []
    awake = list(range(term.n))
    while awake:
        rank = awake.pop()
        while at[rank] < len(lanes[rank]):
            action = lanes[rank][at[rank]]
            missing = next((cause for cause in causes(action, stages) if cause not in done), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(rank)
                break
            found.append((rank, action))
            at[rank] += 1
            if action.kind != "W":
                result = (action.kind[0], action.stage, action.micro)
                done.add(result)
                awake += asleep.pop(result, [])
    if len(found) != sum(len(lane) for lane in lanes):
        raise ValueError(f"{term}: its schedule does not come to an end")
    return tuple(found)


def causes(action: Action, stages: int) -> Sequence[Cause]:
    """The results of other passes that a pass needs."""
    if action.kind == "F":
        return [("F", action.stage - 1, action.micro)] if action.stage else []
    if action.kind == "W":
        return [("B", action.stage, action.micro)]
    own = ("F", action.stage, action.micro)
    return [own] if action.stage == stages - 1 else [own, ("B", action.stage + 1, action.micro)]


def _played(costs: StepCosts, slower: Factors, order: tuple[tuple[int, Action], ...]) -> Step:
    term, classes = costs.term, len(slower.counts)
    stages = term.n * term.chunks
    home = [stage_rank(stage, term.n, term.chunks, term.schedule) for stage in range(stages)]
    seconds = {
        "F": costs.forward_s, "BW": costs.backward_s, "W": costs.weight_s,
        "B": [whole - part for whole, part in zip(costs.backward_s, costs.weight_s, strict=True)],
    }  # fmt: skip
    spans = {kind: [each * slower.compute[:, home[stage]] for stage, each in enumerate(row)]
             for kind, row in seconds.items()}  # fmt: skip
    message = costs.message_s * slower.message
    free = [np.zeros(classes) for _ in range(term.n)]
    there: dict[Cause, Times] = {}
    starts, stops = np.empty((len(order), classes)), np.empty((len(order), classes))
    for number, (rank, action) in enumerate(order):
        start = free[rank]
        received = False
        for cause in causes(action, stages):
            if home[cause[1]] != rank:
                received = True
                start = np.maximum(start, there[cause])
        if received:
            start = start + message
        stop = start + spans[action.kind][action.stage]
        starts[number], stops[number] = start, stop
        free[rank] = stop
        if action.kind != "W":
            there[(action.kind[0], action.stage, action.micro)] = stop
            onward = action.stage + (1 if action.kind == "F" else -1)
            if 0 <= onward < stages and home[onward] != rank:
                # The result is on its way at once; its sender is busy until it has left.
                free[rank] = stop + message
    passed = np.stack(free)
    # Gradients of one stage are summed over an island; all of its ranks wait for all before the next step.
    ends = np.where(slower.inside[:, None, :], passed, 0.0).max(axis=2)
    reduced = ends + (costs.data_s * slower.data)[:, None] + costs.optimizer_s
    island_s = reduced.max(axis=1) * (1 + costs.waits) + costs.fixed_s
    slowest = int(island_s.argmax())
    return Step(
        costs=costs, counts=slower.counts, order=order, starts_s=starts, stops_s=stops, passed_s=passed,
        reduced_s=reduced[slowest], island_s=island_s, step_s=float(island_s[slowest]),
    )  # fmt: skip
