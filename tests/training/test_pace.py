"""What all islands do together happens when they meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.training.pace import Pace


@given(st.integers(1, 20), st.integers(1, 30))
def test_without_islands_everything_happens_at_its_own_step(every: int, steps: int) -> None:
    assert [step for step in range(1, steps + 1) if Pace(1).due(step, every)] == list(range(every, steps + 1, every))


@given(st.integers(1, 12), st.integers(1, 20))
def test_what_is_wanted_between_two_meetings_happens_once_at_the_second(period: int, every: int) -> None:
    steps = range(1, 20 * period * every + 1)
    done = [step for step in steps if Pace(period).due(step, every)]
    wanted = {-(-step // period) * period for step in range(every, len(steps) + 1, every)}
    assert done == sorted(step for step in wanted if step <= len(steps))


@pytest.mark.parametrize("period", [1, 4])
def test_never_is_never(period: int) -> None:
    assert not any(Pace(period).due(step, 0) for step in range(100))
