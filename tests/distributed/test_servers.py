"""Parameter servers on real ranks: the same model as an all-reduce gives, whoever serves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ranks = Callable[..., list[Any]]
PROVE = "distributed.server_targets:prove_served"

COLOCATED = [
    ("plain", "dp(2, via=ps(1, colocated=True))"), ("norm", "dp(2, via=ps(2, colocated=True))"),
    ("unused", "dp(2, via=ps(2, colocated=True))"), ("uneven", "dp(2, via=ps(2, colocated=True))"),
    ("momentum", "dp(2, via=ps(2, colocated=True)) * accumulate(2)"), ("plain", "dp(2, sync=ssp(0))"),
]  # fmt: skip


def proven(ranks: Ranks, cases: list[tuple[str, str]], *, world: int, steps: int = 5) -> None:
    asked = {"cases": [(job, text, "dp(2)") for job, text in cases], "steps": steps}
    for case, rows in zip(cases, zip(*ranks(PROVE, asked, ranks=world), strict=True), strict=True):
        assert sum(row["compared"] for row in rows) > 0, case
        assert max(row["difference"] for row in rows) < 1e-10, (case, rows)
        assert [row["ledger"] for row in rows] == [[]] * world, case


def test_servers_among_workers_train_as_one_process(ranks: Ranks) -> None:
    proven(ranks, COLOCATED, world=2)
