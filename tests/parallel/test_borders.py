"""Messages of a pipeline need no tags: whatever the schedule, a rank receives in the order in which the other sends."""

from __future__ import annotations

from collections import defaultdict

import pytest

from shoal.parallel.pipeline.borders import lanes
from shoal.parallel.pipeline.executor import _needs
from shoal.strategy import pp
from shoal.strategy.schedule import Action, actions, stage_rank

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]


def makes(action: Action, num_stages: int) -> tuple[str, int, int] | None:
    """The message that an action sends."""
    if action.kind == "F":
        return ("forward", action.stage + 1, action.micro) if action.stage < num_stages - 1 else None
    return ("backward", action.stage, action.micro) if action.kind in ("B", "BW") and action.stage else None


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("micros", [1, 2, 3, 5])
def test_messages_are_received_in_the_order_in_which_they_are_sent(
    schedule: str, chunks: int, ranks: int, micros: int
) -> None:
    term = pp(ranks, schedule, micro=micros * ranks, chunks=chunks)  # type: ignore[arg-type]
    num_stages = ranks * chunks
    home = [stage_rank(stage, ranks, chunks, schedule) for stage in range(num_stages)]
    sent, received = defaultdict(list), defaultdict(list)
    for rank, order in enumerate(actions(term)):
        for action in order:
            message = makes(action, num_stages)
            if message is not None:
                kind, border, _ = message
                to = home[border if kind == "forward" else border - 1]
                sent[kind, rank, to].append(message)
            message = _needs(action, num_stages)
            if message is not None:
                kind, border, _ = message
                source = home[border - 1 if kind == "forward" else border]
                received[kind, source, rank].append(message)
    apart = [pair for pair in sent if pair[1] != pair[2]]
    assert apart
    assert all(sent[pair] == received[pair] for pair in apart)
    used = {(kind == "forward", to > source) for kind, source, to in apart}
    assert used == set(lanes(home))


def test_a_pipeline_without_turns_needs_two_lanes() -> None:
    assert lanes([0, 1, 2]) == [(True, True), (False, False)]
    assert len(lanes([0, 1, 0, 1])) == len(lanes([0, 1, 1, 0])) == 4
