"""Plays a pipeline schedule against a clock: when each action starts and stops, who idles, what is kept in memory.

A rank takes its actions in order and waits for what the next one needs (a blocking receive); what it has computed is
on its way at once (an asynchronous send), and a message keeps both ends busy, as measured (docs/simulate.md). A
schedule that plays to its end under these rules cannot deadlock in an executor that keeps them; one that does not is
refused with the sentence that says who waits for whom.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.strategy.schedule import Action, actions, stage_rank
from shoal.strategy.terms import pp

Cost = float | Sequence[float]
"""Seconds, one number for all stages or one for each."""

Needed = tuple[str, int, int]
"""("F" or "B", stage, micro-batch): the result that an action waits for."""


class ScheduleDeadlock(ValueError):
    """A schedule in which ranks wait for each other for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One action with its time."""

    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
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


def play(
    per_rank: Sequence[Sequence[Action]],
    *,
    ranks: int,
    chunks: int,
    schedule: str,
    forward_s: Cost = 1.0,
    backward_s: Cost = 2.0,
    weight_s: Cost | None = None,
    transfer_s: float = 0.0,
) -> Played:
    """The schedule's times, given the costs of a forward and of a whole backward through a stage, and of a message from
    one rank to another.

    `weight_s` is the part of `backward_s` that W takes where the backward is split, half of it unless told.
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
        "F": forward, "BW": backward, "W": weight,
        "B": [whole - part for whole, part in zip(backward, weight, strict=True)],
    }  # fmt: skip
    homes = [stage_rank(stage, ranks, chunks, schedule) for stage in range(stages)]
    _refuse_misplaced(per_rank, homes)
    lanes = _clock(per_rank, homes, costs, transfer_s)
    makespan_s = max((lane[-1].stop_s for lane in lanes if lane), default=0.0)
    return Played(
        schedule=schedule, ranks=ranks, chunks=chunks,
        lanes=tuple(tuple(lane) for lane in lanes),
        makespan_s=makespan_s,
        idle_s=tuple(makespan_s - sum(costs[a.kind][a.stage] for a in order) for order in per_rank),
        in_flight=tuple(most_kept(order) for order in per_rank),
    )  # fmt: skip


def play_term(
    term: pp, *, forward_s: Cost = 1.0, backward_s: Cost = 2.0, weight_s: Cost | None = None, transfer_s: float = 0.0
) -> Played:
    """`play` of a term's own schedule."""
    return play(
        actions(term), ranks=term.n, chunks=term.chunks, schedule=term.schedule,
        forward_s=forward_s, backward_s=backward_s, weight_s=weight_s, transfer_s=transfer_s,
    )  # fmt: skip


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


def _clock(
    per_rank: Sequence[Sequence[Action]], homes: Sequence[int], costs: dict[str, list[float]], transfer_s: float
) -> list[list[Box]]:
    """Each rank goes on until it must wait; a result wakes those who wait for it. What is left asleep is a deadlock."""
    lanes: list[list[Box]] = [[] for _ in per_rank]
    free_s: list[float] = [0] * len(per_rank)  # Whole numbers: costs may be exact fractions.
    there_s: dict[Needed, float] = {}
    asleep: dict[Needed, list[int]] = defaultdict(list)
    awake = list(range(len(per_rank)))
    while awake:
        rank = awake.pop()
        lane, order = lanes[rank], per_rank[rank]
        while len(lane) < len(order):
            action = order[len(lane)]
            needs = _needs(action, len(homes))
            missing = next((need for need in needs if need not in there_s), None)
            if missing is not None:
                asleep[missing].append(rank)
                break
            sent = [there_s[need] for need in needs if homes[need[1]] != rank]
            start_s = max([free_s[rank], *sent]) + (transfer_s if sent else 0)
            stop_s = free_s[rank] = start_s + costs[action.kind][action.stage]
            lane.append(Box(action=action, start_s=start_s, stop_s=stop_s))
            if action.kind != "W":
                result = (action.kind[0], action.stage, action.micro)
                there_s[result] = stop_s
                awake += asleep.pop(result, [])
                onward = action.stage + (1 if action.kind == "F" else -1)
                if 0 <= onward < len(homes) and homes[onward] != rank:
                    free_s[rank] = stop_s + transfer_s
    waiting = {rank: need for need, sleepers in asleep.items() for rank in sleepers}
    if waiting:
        raise ScheduleDeadlock(_who_waits(waiting, per_rank, [len(lane) for lane in lanes], homes))
    return lanes


def _needs(action: Action, stages: int) -> list[Needed]:
    stage, micro = action.stage, action.micro
    if action.kind == "F":
        return [("F", stage - 1, micro)] if stage else []
    if action.kind == "W":
        return [("B", stage, micro)]
    return [("F", stage, micro)] + ([("B", stage + 1, micro)] if stage < stages - 1 else [])


def _who_waits(
    waiting: dict[int, Needed], per_rank: Sequence[Sequence[Action]], done: Sequence[int], homes: Sequence[int]
) -> str:
    told = []
    for rank, (kind, stage, micro) in sorted(waiting.items()):
        later = per_rank[homes[stage]][done[homes[stage]] :]
        comes = any(a.kind[0] == kind and (a.stage, a.micro) == (stage, micro) for a in later)
        why = f"which rank {homes[stage]} has further down" if comes else "which nobody computes"
        told.append(f"rank {rank} cannot start {per_rank[rank][done[rank]]}: it waits for {kind}(stage {stage}, "
                    f"micro-batch {micro}), {why}")  # fmt: skip
    return "the schedule deadlocks: " + "; ".join(told)


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
