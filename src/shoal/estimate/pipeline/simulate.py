"""The event simulation of a pipeline: when each action starts and stops, which rank idles, what is kept in memory.

A rank takes its actions in order and waits for what the next one needs (a blocking receive); what it has computed is
on its way at once (an asynchronous send), and a message keeps both ends busy, as measured (docs/simulate.md). A
schedule that runs to its end under these rules cannot deadlock in an executor that keeps them; one that does not is
refused with a sentence that names the ranks that wait for each other.

Timelines and `shoal simulate` show it. Estimates need the end of the last action only, for many pipelines, and read
`spans.py`, which tests hold to this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.strategy.schedule import Action, actions, stage_rank
from shoal.strategy.terms import pp

Cost = float | Sequence[float]
"""Seconds, one number for all stages or one for each."""

Needed = tuple[str, int, int]
"""("F" or "B", stage, micro-batch): the result that an action waits for."""


class ScheduleDeadlock(ValueError):
    """A schedule in which ranks wait for each other permanently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One action with its time."""

    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimeline:
    """One step of a pipeline, with its times."""

    schedule: str
    ranks: int
    chunks: int
    lanes: tuple[tuple[Box, ...], ...]
    """For each rank its actions in order."""
    makespan_s: float
    """From the first start to the last stop."""
    idle_s: tuple[float, ...]
    """For each rank the part of the makespan in which it computes nothing."""
    in_flight: tuple[int, ...]
    """For each rank the most activations it keeps at a time, counted in passes of one micro-batch through one stage:
    from F to the end of BW, or of W where the backward is split. A stage is 1/chunks of what a rank holds.
    """

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that is idle."""
        return sum(self.idle_s) / (self.ranks * self.makespan_s) if self.makespan_s else 0.0

    @property
    def micro(self) -> int:
        """The micro-batches that enter the pipeline."""
        return sum(box.action.kind == "F" and box.action.stage == 0 for lane in self.lanes for box in lane)

    @property
    def forward_s(self) -> float:
        """A forward through one stage, on average."""
        spans = [box.stop_s - box.start_s for lane in self.lanes for box in lane if box.action.kind == "F"]
        return sum(spans) / len(spans) if spans else 0.0

    @property
    def steady_bubble(self) -> float | None:
        """The idle fraction while the pipeline is full, from the first rank's first backward to its last forward.
        None if it is never full, as with fewer micro-batches than ranks.
        """
        first = self.lanes[0]
        full_s = next((box.start_s for box in first if box.action.kind != "F"), self.makespan_s)
        drains_s = max((box.stop_s for box in first if box.action.kind == "F"), default=0.0)
        if drains_s <= full_s:
            return None
        busy_s = sum(
            max(0, min(box.stop_s, drains_s) - max(box.start_s, full_s)) for lane in self.lanes for box in lane
        )
        return 1 - busy_s / (self.ranks * (drains_s - full_s))


def simulate_schedule(
    per_rank: Sequence[Sequence[Action]],
    *,
    ranks: int,
    chunks: int,
    schedule: str,
    forward_s: Cost = 1.0,
    backward_s: Cost = 2.0,
    weight_s: Cost | None = None,
    transfer_s: float = 0.0,
) -> PipelineTimeline:
    """The schedule's times, given the costs of a forward and of a full backward through a stage, and of a message from
    one rank to another.

    `weight_s` is the part of `backward_s` that W takes where the backward is split, half of it by default.
    """
    stages = ranks * chunks
    if len(per_rank) != ranks:
        raise ValueError(f"the schedule has actions for {len(per_rank)} ranks; expected {ranks}")
    forward, backward = _each("forward_s", forward_s, stages), _each("backward_s", backward_s, stages)
    weight = [cost / 2 for cost in backward] if weight_s is None else _each("weight_s", weight_s, stages)
    for stage in range(stages):
        if weight[stage] > backward[stage]:
            raise ValueError(
                f"weight_s of stage {stage} is {weight[stage]}; it is a part of backward_s, which is {backward[stage]}"
            )
    if not 0 <= transfer_s < float("inf"):
        raise ValueError(f"transfer_s is {transfer_s}; expected seconds, at least 0")
    costs = {
        "F": forward,
        "BW": backward,
        "W": weight,
        "B": [full - part for full, part in zip(backward, weight, strict=True)],
    }
    homes = [stage_rank(stage, ranks, chunks, schedule) for stage in range(stages)]
    _refuse_misplaced(per_rank, homes)
    order = causal_order(per_rank, homes)
    starts_s, stops_s, _ = clock(order, homes, costs, transfer_s)
    return laned(order, starts_s, stops_s, ranks=ranks, chunks=chunks, schedule=schedule)


def laned(
    order: Sequence[tuple[int, Action]],
    starts_s: Sequence[float],
    stops_s: Sequence[float],
    *,
    ranks: int,
    chunks: int,
    schedule: str,
) -> PipelineTimeline:
    """Actions with their times, rank by rank."""
    lanes: list[list[Box]] = [[] for _ in range(ranks)]
    for (rank, action), start_s, stop_s in zip(order, starts_s, stops_s, strict=True):
        lanes[rank].append(Box(action=action, start_s=start_s, stop_s=stop_s))
    makespan_s = max(stops_s, default=0.0)
    return PipelineTimeline(
        schedule=schedule,
        ranks=ranks,
        chunks=chunks,
        lanes=tuple(tuple(lane) for lane in lanes),
        makespan_s=makespan_s,
        idle_s=tuple(makespan_s - sum(box.stop_s - box.start_s for box in lane) for lane in lanes),
        in_flight=tuple(most_kept([box.action for box in lane]) for lane in lanes),
    )


def simulate_term(
    term: pp, *, forward_s: Cost = 1.0, backward_s: Cost = 2.0, weight_s: Cost | None = None, transfer_s: float = 0.0
) -> PipelineTimeline:
    """`simulate_schedule` of a term's own schedule."""
    return simulate_schedule(
        actions(term),
        ranks=term.n,
        chunks=term.chunks,
        schedule=term.schedule,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        transfer_s=transfer_s,
    )


def bubble_formula(term: pp) -> float | None:
    """The idle fraction in closed form, for even stages and messages that take no time; None where there is no closed
    form (zero-bubble with several chunks). For zero-bubble F, B and W are taken to cost the same; for pipedream it is
    the fraction while the pipeline is full.
    """
    n, micro, chunks = term.n, term.micro, term.chunks
    if term.schedule == "pipedream":
        return 0.0
    if term.schedule == "zero-bubble":
        # The last rank starts n - 1 units late and has 3m units to do; or, with few micro-batches, the last input
        # gradient must still come back to the first rank, whose last weight gradient follows it.
        span = max(3 * micro + n - 1, 2 * micro + 2 * n - 1)
        return (span - 3 * micro) / span if chunks == 1 else None
    return (n - 1) / (chunks * micro + n - 1)


def bubble_formula_text(term: pp) -> str | None:
    """The closed form itself, with n ranks, m micro-batches and v chunks."""
    if term.schedule == "zero-bubble":
        few = term.micro < term.n
        ratio = "(2n - m - 1) / (2n + 2m - 1)" if few else "(n - 1) / (3m + n - 1)"
        return ratio if term.chunks == 1 else None
    return {
        "pipedream": "0 while the pipeline is full",
        "interleaved": "(n - 1) / (vm + n - 1)",
    }.get(term.schedule, "(n - 1) / (m + n - 1)")


def _each(name: str, cost: Cost, stages: int) -> list[float]:
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * stages
    if len(costs) != stages:
        raise ValueError(
            f"{name} has {len(costs)} numbers; expected one for each of the {stages} stages, or one for all"
        )
    for stage, value in enumerate(costs):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} of stage {stage} is {value}; expected seconds, at least 0")
    return costs


def _refuse_misplaced(per_rank: Sequence[Sequence[Action]], homes: Sequence[int]) -> None:
    seen: set[Action] = set()
    for rank, order in enumerate(per_rank):
        for action in order:
            if not 0 <= action.stage < len(homes):
                raise ValueError(f"rank {rank} has {action}; there are stages 0 to {len(homes) - 1}")
            if homes[action.stage] != rank:
                raise ValueError(f"rank {rank} has {action}, but that stage lives on rank {homes[action.stage]}")
            if action in seen:
                raise ValueError(f"rank {rank} has {action} twice")
            seen.add(action)


def causal_order(per_rank: Sequence[Sequence[Action]], homes: Sequence[int]) -> list[tuple[int, Action]]:
    """(rank, action) of all actions, each after what it waits for. Each rank goes on until it must wait; a result wakes
    those who wait for it. What is left asleep is a deadlock."""
    found: list[tuple[int, Action]] = []
    at = [0] * len(per_rank)
    done: set[Needed] = set()
    asleep: dict[Needed, list[int]] = defaultdict(list)
    awake = list(range(len(per_rank)))
    while awake:
        rank = awake.pop()
        while at[rank] < len(per_rank[rank]):
            action = per_rank[rank][at[rank]]
            missing = next((need for need in _needs(action, len(homes)) if need not in done), None)
            if missing is not None:
                asleep[missing].append(rank)
                break
            found.append((rank, action))
            at[rank] += 1
            if action.kind != "W":
                result = (action.kind[0], action.stage, action.micro)
                done.add(result)
                awake += asleep.pop(result, [])
    waiting = {rank: need for need, sleepers in asleep.items() for rank in sleepers}
    if waiting:
        raise ScheduleDeadlock(_who_waits(waiting, per_rank, at, homes))
    return found


def clock(
    order: Sequence[tuple[int, Action]],
    homes: Sequence[int],
    costs: Mapping[str, Sequence[Any]],
    message_s: Any,
    *,
    begin_s: Any = 0,
    later: Callable[[Any, Any], Any] = max,
) -> tuple[list[Any], list[Any], list[Any]]:
    """(starts, stops) of the actions, and when each rank is free again. `costs`: kind of action -> stage -> seconds.
    Seconds are numbers, exact fractions too, or arrays of several pipelines, with their maximum as `later`."""
    free_s: list[Any] = [begin_s] * (1 + max(homes))
    there_s: dict[Needed, Any] = {}
    starts_s, stops_s = [], []
    for rank, action in order:
        start_s, received = free_s[rank], False
        for need in _needs(action, len(homes)):
            if homes[need[1]] != rank:
                start_s, received = later(start_s, there_s[need]), True
        if received:
            start_s = start_s + message_s
        stop_s = free_s[rank] = start_s + costs[action.kind][action.stage]
        starts_s.append(start_s)
        stops_s.append(stop_s)
        if action.kind != "W":
            there_s[action.kind[0], action.stage, action.micro] = stop_s
            onward = action.stage + (1 if action.kind == "F" else -1)
            if 0 <= onward < len(homes) and homes[onward] != rank:
                # The result is on its way at once; its sender is busy until it has left.
                free_s[rank] = stop_s + message_s
    return starts_s, stops_s, free_s


def _needs(action: Action, stages: int) -> tuple[Needed, ...]:
    stage, micro = action.stage, action.micro
    if action.kind == "F":
        return (("F", stage - 1, micro),) if stage else ()
    if action.kind == "W":
        return (("B", stage, micro),)
    own = ("F", stage, micro)
    return (own, ("B", stage + 1, micro)) if stage < stages - 1 else (own,)


def _who_waits(
    waiting: dict[int, Needed], per_rank: Sequence[Sequence[Action]], done: Sequence[int], homes: Sequence[int]
) -> str:
    waits = []
    for rank, (kind, stage, micro) in sorted(waiting.items()):
        later = per_rank[homes[stage]][done[homes[stage]] :]
        comes = any(a.kind[0] == kind and (a.stage, a.micro) == (stage, micro) for a in later)
        why = f"which rank {homes[stage]} has further down" if comes else "which no rank computes"
        waits.append(
            f"rank {rank} cannot start {per_rank[rank][done[rank]]}: it waits for {kind}(stage {stage}, "
            f"micro-batch {micro}), {why}"
        )
    return "the schedule deadlocks: " + "; ".join(waits)


def most_kept(order: Sequence[Action]) -> int:
    """The most activations that a rank keeps at a time, in passes of one micro-batch through one stage."""
    split = {(action.stage, action.micro) for action in order if action.kind == "W"}
    kept = most = 0
    for action in order:
        if action.kind == "F":
            kept += 1
            most = max(most, kept)
        elif action.kind != "B" or (action.stage, action.micro) not in split:
            kept -= 1
    return most
