"""Pipeline schedules as values: for each rank the ordered list of what it computes in one step.

A stage is one piece of the model, numbered from the input to the loss over all ranks; with several chunks a rank holds
several stages. The lists and `stage_rank` define the messages as well: the output of F(stage, m) goes to the rank of
stage + 1 as soon as it is there, the gradient of B(stage, m) or BW(stage, m) to the rank of stage - 1. A rank waits for
what its next action needs and for nothing else. Every stage takes its micro-batches in order, in both directions, so
the messages of one kind into one stage arrive as they are used; others between the same two ranks may overtake them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.strategy.legality.check import require_legal
from shoal.strategy.terms import pp
from shoal.strategy.zero_bubble import zero_bubble

Kind = Literal["F", "B", "W", "BW"]


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one micro-batch through one stage."""

    kind: Kind
    """F forward; BW the full backward; B gradients of the stage's inputs only; W gradients of its weights only."""
    stage: int
    """Global: 0 holds the input, ranks * chunks - 1 the loss."""
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro})"


def stage_rank(stage: int, ranks: int, chunks: int, schedule: str) -> int:
    """The rank along pp that holds a stage.

    Stages are assigned in rounds, 0 to n-1 and again from 0. Zero-bubble with two chunks turns round instead (a V):
    the rank of the first stage also has the loss, so its backward pass starts without a trip through the pipeline.
    """
    if not 0 <= stage < ranks * chunks:
        raise ValueError(
            f"stage {stage}: {ranks} ranks with {chunks} chunks each hold stages 0 to {ranks * chunks - 1}"
        )
    if schedule == "zero-bubble" and chunks == 2 and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def rank_stages(rank: int, ranks: int, chunks: int, schedule: str) -> tuple[int, ...]:
    """The stages that a rank holds, from the input towards the loss: one in each chunk."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank}: a pipeline of {ranks} ranks has ranks 0 to {ranks - 1}")
    stages = range(ranks * chunks)
    return tuple(stage for stage in stages if stage_rank(stage, ranks, chunks, schedule) == rank)


def actions(term: pp) -> list[list[Action]]:
    """For each rank along pp what it computes in one step, in order.

    For pipedream, which has no step that ends, this is a run of `micro` micro-batches from its start until it is
    drained; `steady` gives any other length. A term that is not legal raises IllegalStrategy, which names legal ones.
    """
    require_legal(term)
    everyone = range(term.n)
    if term.schedule == "gpipe":
        return [_gpipe(rank, term.micro) for rank in everyone]
    if term.schedule == "interleaved":
        return [_interleaved(rank, term) for rank in everyone]
    if term.schedule == "zero-bubble":
        held = [rank_stages(rank, term.n, term.chunks, term.schedule) for rank in everyone]
        return [[Action(*action) for action in order] for order in zero_bubble(held=held, micro=term.micro)]
    return [_one_forward_one_backward(rank, term.n, term.micro) for rank in everyone]


def steady(term: pp, micros: int, *, drain: bool = False) -> list[list[Action]]:
    """PipeDream's order for a run of `micros` micro-batches: rank r goes n - r forwards ahead, then backward and
    forward take turns for as long as it goes.

    The lists end with the last forward of each rank, as the run would go on from there: the order for fewer
    micro-batches is always the beginning of the order for more. With `drain` the backward passes that are still out
    follow, as at the end of training.
    """
    if term.schedule != "pipedream":
        raise ValueError(f"{term} flushes after each step; only pipedream runs without: use actions({term})")
    if micros < 1:
        raise ValueError(f"micros is {micros}; expected at least one micro-batch")
    drained = [_one_forward_one_backward(rank, term.n, micros) for rank in range(term.n)]
    if drain:
        return drained
    ends = [max(place for place, action in enumerate(order) if action.kind == "F") + 1 for order in drained]
    return [order[:end] for order, end in zip(drained, ends, strict=True)]


def last_backward(rank_actions: Sequence[Action], stage: int) -> Action:
    """The action after which the stage's weight gradients are complete: from then on they can be reduced."""
    for action in reversed(rank_actions):
        if action.stage == stage and action.kind in ("W", "BW"):
            return action
    raise ValueError(
        f"stage {stage} has no backward pass among these {len(rank_actions)} actions; is it another rank's?"
    )


def _gpipe(rank: int, micro: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return [Action(kind, rank, m) for kind in ("F", "BW") for m in range(micro)]  # type: ignore[arg-type]


def _one_forward_one_backward(rank: int, ranks: int, micro: int) -> list[Action]:
    """Warm-up, then forward and backward in turns, then the backwards that are left (Narayanan et al. 2019)."""
    warm_up = min(ranks - 1 - rank, micro)
    return _in_turns(
        forwards=[Action("F", rank, m) for m in range(micro)],
        backwards=[Action("BW", rank, m) for m in range(micro)],
        warm_up=warm_up,
    )


def _interleaved(rank: int, term: pp) -> list[Action]:
    """Rounds of n micro-batches pass through one chunk after the other (Narayanan et al. 2021, section 2.2).

    The warm-up lets the first round come back: every chunk but the last for n micro-batches, and twice the distance to
    the last rank, once for the way there and once for the way back.
    """
    ranks, last_chunk = term.n, term.chunks - 1
    firsts = range(0, term.micro, ranks)
    turns = [(chunk, first + m) for first in firsts for chunk in range(term.chunks) for m in range(ranks)]
    return _in_turns(
        forwards=[Action("F", chunk * ranks + rank, micro) for chunk, micro in turns],
        backwards=[Action("BW", (last_chunk - chunk) * ranks + rank, micro) for chunk, micro in turns],
        warm_up=min(last_chunk * ranks + 2 * (ranks - 1 - rank), len(turns)),
    )


def _in_turns(*, forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - warm_up :]
