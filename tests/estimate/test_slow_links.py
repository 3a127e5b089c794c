"""Steps over slow links: the exchange is predicted from bytes, rate and period; what cannot be read is said."""

from __future__ import annotations

import pytest

from shoal.estimate.slow_links import exchange_s, is_slow_link, predict_slow_links, with_sources
from shoal.estimate.validate import score

MODEL = {"parameters": "30846720", "wire_dtype": "fp32"}


def row(strategy: str, mbps: float, compute_s: float = 0.025, **more: str) -> dict[str, str]:
    return {"strategy": strategy, "link_mbps": str(mbps), "compute_s": str(compute_s), **MODEL, **more}


def step_s(strategy: str, mbps: float, **more: str) -> float:
    (found,) = predict_slow_links([row(strategy, mbps, **more)])
    assert found.step_s is not None, found.reason
    return found.step_s


def test_a_fast_link_takes_the_time_of_its_ring_and_of_the_copies() -> None:
    nbytes, rate = 4e8, 10e9
    found = exchange_s(nbytes, ranks=4, rate_bytes_per_s=rate, idle_s=0.1)
    assert found == pytest.approx(1.5 * nbytes / rate + 2 * nbytes / 16e9, rel=0.01)
    assert exchange_s(nbytes, ranks=1, rate_bytes_per_s=rate, idle_s=9) == 0


def test_losses_cost_more_the_slower_the_link() -> None:
    lost = [exchange_s(1e8, ranks=2, rate_bytes_per_s=rate, idle_s=0) * rate / 1e8 - 1 for rate in (5e6, 25e6, 125e6)]
    assert lost[0] > 0.2 > lost[1] > 0.03 > lost[2]


def test_an_exchange_is_shared_among_its_steps_and_takes_longer_after_seconds_of_computing() -> None:
    every, eighth = step_s("dp(4, sync=diloco(1))", 993) - 0.025, step_s("dp(4, sync=local(8))", 993) - 0.025
    assert eighth == pytest.approx(every / 8)
    assert step_s("dp(4)", 993) - 0.025 == pytest.approx(every)
    assert 128 * (step_s("dp(4, sync=diloco(128))", 993) - 0.025) == pytest.approx(every + 0.5)
    assert step_s("dp(4, sync=diloco(1))", 993, wire_dtype="bf16") - 0.025 == pytest.approx(every / 2)


def test_rows_are_scored_by_scheme_and_rate_and_bad_ones_carry_the_reason() -> None:
    rows = with_sources(
        [
            row("dp(4, sync=local(8))", 198.5, step_s="1.0"),
            row("dp(4)", 50, step_s="30"),
            row("dp(4, sync=loca(8))", 50, step_s="1"),
            row("dp(4)", 50, step_s="1", wire_dtype="fp4"),
            row("dp(4)", -1, step_s="1"),
        ]
    )
    assert is_slow_link(rows)
    assert not is_slow_link([{"strategy": "dp(4)", "step_s": "1"}])
    predictions = predict_slow_links(rows)
    assert [bool(each.reason) for each in predictions] == [False, False, True, True, True]
    assert "expected one of fp32" in predictions[3].reason
    assert set(score(rows, predictions)) == {"all", "local, 200 Mb/s", "bsp, 50 Mb/s", "bsp, -1 Mb/s", "loca, 50 Mb/s"}
