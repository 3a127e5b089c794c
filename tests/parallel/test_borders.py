"""The groups that the messages of a pipeline need on an accelerator: one for each kind and direction in use."""

from __future__ import annotations

import pytest

from shoal.parallel.pipeline.borders import lanes
from shoal.parallel.pipeline.executor import _sent_to
from shoal.strategy import pp
from shoal.strategy.schedule import stage_rank

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]


@pytest.mark.parametrize(("schedule", "chunks"), KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_there_is_a_lane_for_each_kind_and_direction_that_a_schedule_uses(
    schedule: str, chunks: int, ranks: int
) -> None:
    term = pp(ranks, schedule, micro=2 * ranks, chunks=chunks)  # type: ignore[arg-type]
    home = [stage_rank(stage, ranks, chunks, schedule) for stage in range(ranks * chunks)]
    used = {(kind == "forward", to > source) for to in range(ranks) for kind, source in _sent_to(term, to)}
    assert used == set(lanes(home))


def test_a_pipeline_without_turns_needs_two_lanes() -> None:
    assert lanes([0, 1, 2]) == [(True, True), (False, False)]
    assert len(lanes([0, 1, 0, 1])) == len(lanes([0, 1, 1, 0])) == 4
