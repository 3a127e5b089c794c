"""What offload is estimated to free and to cost, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from shoal.estimate.offload import BUFFERS, PARTS, StepPhases, offload_estimate

PHASES = StepPhases(forward_s=1.0, backward_s=2.0, update_s=0.5)


def test_what_moves_behind_computing_costs_only_its_first_and_last_part() -> None:
    found = offload_estimate(PHASES, state_bytes=64e9, read_bytes_per_s=640e9, write_bytes_per_s=320e9)
    assert found.step_s == pytest.approx(3.5 + (0.1 + 0.2) / PARTS)
    assert found.moved_bytes == 128e9
    assert found.freed_bytes == pytest.approx(64e9 * (1 - BUFFERS / PARTS))


def test_what_moves_more_slowly_than_it_is_computed_sets_the_time() -> None:
    state = offload_estimate(PHASES, state_bytes=64e9, read_bytes_per_s=64e9, write_bytes_per_s=32e9)
    assert state.step_s == pytest.approx(1 + 2 + 2 + (1 + 2) / PARTS)
    kept = offload_estimate(PHASES, activation_bytes=3e9, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    assert kept.step_s == pytest.approx(3 + 3 + 0.5)
    weights = offload_estimate(
        PHASES, parameter_bytes=6e9, in_use_bytes=1e9, read_bytes_per_s=2e9, write_bytes_per_s=6e9
    )
    assert weights.step_s == pytest.approx(3 + 3 + 3 + (3 + 1) / PARTS)
    assert weights.freed_bytes == pytest.approx(5e9 - 6e9 * BUFFERS / PARTS)


def test_nothing_offloaded_changes_nothing() -> None:
    found = offload_estimate(PHASES)
    assert (found.step_s, found.freed_bytes, found.moved_bytes) == (3.5, 0, 0)
