"""Jobs of kinds that users write are proven, at the traffic that their formulas predict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.job import load_job
from shoal.job.own_code import require_runs

JOBS = Path(__file__).parent / "jobs" / "users.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "strategies"),
    [
        ("frozen", ("dp(2)", "dp(2) * recompute('full')", "dp(2, zero=3)")),
        ("penalised", ("dp(2)", "dp(2, zero=2) * accumulate(2)")),
        ("half", ("dp(2)",)),
        ("packed", ("dp(2)", "dp(2, zero=3) * accumulate(2)", "pp(2, 'zero-bubble', micro=2)")),
        ("hooked", ("dp(2)", "dp(2, zero=3) * accumulate(2)", "tp(2)")),
        ("hooked", ("pp(2, '1f1b', micro=2)", "pp(2, 'zero-bubble', micro=2)")),
        ("layer_drop", ("dp(2)", "dp(2, zero=3)", "dp(2, zero=3) * accumulate(2)")),
        ("recomputing", ("dp(2)", "dp(2, zero=3)", "dp(2, zero=3) * accumulate(2)")),
        ("reentrant", ("dp(2, zero=3)", "dp(2, zero=3) * accumulate(2)")),
        ("by_length", ("cp(2)", "cp(2, 'ulysses')")),
    ],
)
def test_a_users_job_is_proven(ranks: Callable[..., Any], job: str, strategies: tuple[str, ...]) -> None:
    arguments = {"cases": [(f"{JOBS}:{job}", strategy) for strategy in strategies], "steps": 3}
    for rows in ranks("distributed.proofs:prove_many", arguments, ranks=2, timeout_s=200, hang_after_s=120):
        for row in rows:
            assert row.get("difference", 1.0) < 1e-10, row
            assert not row["ledger"], row


def test_a_forward_that_differentiates_is_tried_before_ranks_start() -> None:
    require_runs(load_job(f"{JOBS}:penalised"), samples=4)
