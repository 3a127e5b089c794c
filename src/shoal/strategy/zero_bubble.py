"""The order of a zero-bubble pipeline, found by a greedy list scheduler where no good one is known.

The backward pass is split (Qi et al. 2023): B, the gradient of a stage's inputs, is what the stage before waits for; W,
the gradient of its weights, can wait, and fills the time in which the rank would idle. Every pass is taken to cost one
unit. No rank ever keeps more than n micro-batches, from the first F to the last W, which is what 1F1B keeps on its
first rank; that bound also makes the order free of deadlock: micro-batches enter every rank in their order, so the
oldest one that is not done always has room.

With one chunk this is ZB-H1, and it is optimal: max(3m + n - 1, 2m + 2n - 1) units for m micro-batches on n ranks. Two
chunks in the shape of a V, with enough micro-batches, follow the order of the paper's section 6: 6m + n - 1 units, as
the scheduler's best, but with room between a message and its use, so that it loses a third as much when passes differ
in length. For the rest no rule of choice is best everywhere, so a few are tried and the shortest result is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Literal

ScheduledPass = tuple[Literal["F", "B", "W"], int, int]
"""(kind, stage, micro-batch)"""

WITHOUT_BOUND = 1 << 62

FIRST: tuple[Literal["F"], Literal["B"]] = ("F", "B")


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorityRule:
    """Which of several possible passes a rank runs first."""

    first: Literal["F", "B"]
    """Which of a forward and an input gradient goes first; weight gradients come after both."""
    most_owed: int
    """Number of weight gradients that may be deferred; beyond it they take precedence."""


def zero_bubble(*, held: Sequence[Sequence[int]], micro: int) -> list[list[ScheduledPass]]:
    """For each rank its order, given the stages that each rank holds (from the input towards the loss)."""
    ranks, chunks = len(held), len(held[0])
    if is_v(held, micro):
        return [_v_order(rank, ranks, micro) for rank in range(ranks)]
    if chunks == 1:
        return [_one_chunk(rank, ranks, micro) for rank in range(ranks)]
    bounds = sorted({chunks, ranks, ranks * chunks // 2, ranks * (chunks - 1), WITHOUT_BOUND})
    rules = [PriorityRule(first=first, most_owed=bound) for first in FIRST for bound in bounds]
    found = [_Scheduler(held=held, micro=micro, rule=rule).run() for rule in rules]
    return min(found, key=lambda one: one[0])[1]


def _one_chunk(rank: int, ranks: int, micro: int) -> list[ScheduledPass]:
    """Forwards and input gradients in turns as in 1F1B; rank r puts off r weight gradients, so that all end at once."""
    ahead, owed = ranks - 1 - rank, max(0, rank - max(0, ranks - micro))
    order: list[ScheduledPass] = []
    for number in range(-ahead, micro):
        if 0 <= number + ahead < micro:
            order.append(("F", rank, number + ahead))
        if number >= 0:
            order.append(("B", rank, number))
        if number >= owed:
            order.append(("W", rank, number - owed))
    order += [("W", rank, number) for number in range(micro - owed, micro)]
    return order


DOWN, UP = 0, 1
"""The sides of a V: rank r holds stage r on the way down and stage 2n - 1 - r on the way up."""


def is_v(held: Sequence[Sequence[int]], micro: int) -> bool:
    """Whether `v_passes` is the order: two chunks in the shape of a V, and enough micro-batches."""
    ranks = len(held)
    return len(held[0]) == 2 and micro >= 2 * ranks - 1 and all(low + high == 2 * ranks - 1 for low, high in held)


def v_passes(rank: int, ranks: int, micro: int) -> list[tuple[Literal["F", "B", "W"], int]]:
    """(kind, side) of a rank's passes in their order; those of one kind and side take the micro-batches in turn."""
    after = ranks - rank
    forward = ("F", DOWN)
    steady = [("B", DOWN), ("W", DOWN), ("F", UP), ("B", UP), ("W", UP)]
    left = micro - (2 * ranks - 1 - rank)
    order = [
        # Until the first micro-batch comes back up, those behind it go down.
        *[forward] * (2 * after - 1),
        *[("F", UP), forward] * rank,
        *steady[2:] * after,
        *[forward, *steady] * left,
        *steady * (micro - ranks - left),
        # No forward is left to fill the gaps: from here on weight gradients do.
        *[("B", DOWN), ("B", UP)] * rank,
        *steady[:2] * after,
        *[("W", UP)] * rank,
        *[("W", DOWN)] * rank,
    ]
    return order  # type: ignore[return-value]


def _v_order(rank: int, ranks: int, micro: int) -> list[ScheduledPass]:
    stages = (rank, 2 * ranks - 1 - rank)
    numbers = {one: count() for one in product("FBW", (DOWN, UP))}
    return [(kind, stages[side], next(numbers[kind, side])) for kind, side in v_passes(rank, ranks, micro)]


class _Scheduler:
    """Unit by unit, every rank picks the best of what it can do now."""

    def __init__(self, *, held: Sequence[Sequence[int]], micro: int, rule: PriorityRule) -> None:
        self.held = held
        self.micro = micro
        self.rule = rule
        self.stages = len(held) * len(held[0])
        # How many micro-batches have had each pass at each stage. They go in order, so a count identifies them.
        self.forwards = [0] * self.stages
        self.inputs = [0] * self.stages
        self.weights = [0] * self.stages

    def run(self) -> tuple[int, list[list[ScheduledPass]]]:
        """(units until the last rank is done, order of each rank)"""
        orders: list[list[ScheduledPass]] = [[] for _ in self.held]
        units, left = 0, 3 * self.stages * self.micro
        done = {"F": self.forwards, "B": self.inputs, "W": self.weights}
        while left:
            # All ranks choose before any of them counts: what is computed in this unit arrives in the next.
            chosen = [self._choice(rank) for rank in range(len(self.held))]
            for order, action in zip(orders, chosen, strict=True):
                if action is not None:
                    order.append(action)
                    done[action[0]][action[1]] += 1
                    left -= 1
            units += 1
        return units, orders

    def _choice(self, rank: int) -> ScheduledPass | None:
        """The oldest micro-batch first; of one micro-batch the forward nearest to the loss, the backward nearest to
        the input.
        """
        held = self.held[rank]
        owed = min(
            ((self.weights[stage], stage) for stage in held if self.weights[stage] < self.inputs[stage]), default=None
        )
        weight: ScheduledPass | None = None if owed is None else ("W", owed[1], owed[0])
        if weight and sum(self.inputs[stage] - self.weights[stage] for stage in held) > self.rule.most_owed:
            return weight
        forward, backward = self._forward(rank), self._backward(held)
        return (forward or backward or weight) if self.rule.first == "F" else (backward or forward or weight)

    def _forward(self, rank: int) -> ScheduledPass | None:
        held, ranks = self.held[rank], len(self.held)
        best: tuple[int, int] | None = None
        for stage in held:
            m = self.forwards[stage]
            if m == self.micro or (stage and self.forwards[stage - 1] == m):
                continue
            if stage == held[0] and m - min(self.weights[other] for other in held) >= ranks:
                continue
            best = min(best or (m, -stage), (m, -stage))
        return None if best is None else ("F", -best[1], best[0])

    def _backward(self, held: Sequence[int]) -> ScheduledPass | None:
        ready = [
            (self.inputs[stage], stage)
            for stage in held
            if self.inputs[stage] < self.forwards[stage]
            and (stage == self.stages - 1 or self.inputs[stage] < self.inputs[stage + 1])
        ]
        return ("B", min(ready)[1], min(ready)[0]) if ready else None
