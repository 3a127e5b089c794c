"""Forty fixed cases of the fuzzer: the same jobs and strategies in every run. `make fuzz` draws others."""

from __future__ import annotations

import pytest

from fuzz.judge import judge

FIXED = range(40)


@pytest.mark.parametrize("number", FIXED)
def test_a_drawn_job_trains_as_one_plain_process_would(number: int) -> None:
    verdicts = list(judge(number, most_ranks=4))
    assert verdicts
    assert [str(verdict) for verdict in verdicts if verdict.end == "failed"] == []
