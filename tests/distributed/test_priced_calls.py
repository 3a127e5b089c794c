"""The calls that a price is made of, on real ranks: what is counted there is what was priced without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.calibration.job_model import job_model, plane_cuts_of
from shoal.comm.ledger import Entry, Key, Ledger, ledger_of
from shoal.estimate.step_calls import step_calls
from shoal.estimate.traffic import calls_of
from shoal.job import load_job
from shoal.planning.here import legal_here
from shoal.strategy import parse, spatial

Ranks = Callable[..., list[Any]]

FEW = {
    "language:tiny": [
        'pp(2, "1f1b", micro=8) * dp(2, zero=2)',
        "dp(2) * dp(2, zero=3)",
        "dp(2, compress=powersgd(4)) * dp(2)",
        'cp(2) * tp(2, sequence=True) * recompute("full")',
    ],
    "image:tiny": [
        'dp(4) * recompute("full")',
        "pp(2, micro=2) * dp(2, zero=1)",
        "dp(2) * spatial(2)",
        'spatial(4, "both")',
    ],
}
EACH = 12
"""Of so many legal strategies one is tried in the long test."""


def comparable(ledger: Ledger) -> dict[Key, Entry | int]:
    """Calls and bytes; of all-reduces the calls alone, since their algorithm is chosen on the ranks."""
    return {key: entry.calls if key.kind == "all_reduce" else entry for key, entry in ledger.entries.items()}


def compare(ranks: Ranks, name: str, strategies: list[str], *, timeout_s: float) -> None:
    job = load_job(name)
    model, _ = job_model(job, planes=plane_cuts_of(map(parse, strategies)))
    arguments = {"job": name, "strategies": strategies}
    found = ranks("distributed.counted_targets:counted", arguments, ranks=4, timeout_s=timeout_s)
    for text in strategies:
        planes = parse(text).term(spatial)
        forward = model.forward if planes is None else model.planes[planes.grid].forward
        for rank, counted in enumerate(found):
            step = step_calls(model.shapes, forward, parse(text), global_batch=job.global_batch, rank=rank)
            priced = ledger_of(calls_of(step.table))
            assert comparable(Ledger.from_json(counted[text])) == comparable(priced), (text, rank)


@pytest.mark.parametrize("name", FEW)
def test_calls_counted_are_calls_priced(name: str, ranks: Ranks) -> None:
    compare(ranks, name, FEW[name], timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_calls_counted_are_calls_priced_of_many_strategies(name: str, ranks: Ranks) -> None:
    _, facts = job_model(load_job(name))
    some = [str(strategy) for strategy in legal_here(facts, world=4)][::EACH]
    compare(ranks, name, some, timeout_s=1800)
