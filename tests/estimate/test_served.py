"""Waiting and staleness under servers, simulated: known answers, and the bounds of the rules."""

from __future__ import annotations

import pytest

from shoal.api.simulate import simulate
from shoal.api.simulate_servers import SimulatedServers
from shoal.estimate.served import ServerCosts, simulate_servers
from shoal.strategy.terms import asp, bsp, softsync, ssp
from shoal.strategy.terms.sync import Served

EQUAL, STRAGGLER = [1.0] * 4, [1.0, 1.0, 1.0, 5.0]


def costs(ticket_s: list[float], **changes: float) -> ServerCosts:
    return ServerCosts(ticket_s=ticket_s, **{"push_s": 0.0, "pull_s": 0.0, "shards": 1, **changes})  # type: ignore[arg-type]


def test_together_all_wait_for_the_slowest_and_by_tickets_nobody_does() -> None:
    together, apart = simulate_servers(bsp(), costs(STRAGGLER)), simulate_servers(asp(), costs(STRAGGLER), steps=200)
    assert together.step_s == pytest.approx(5.0)
    assert together.waiting == pytest.approx(0.75 * 0.8)
    assert together.staleness_mean == 0
    assert apart.step_s == pytest.approx(4 / 3.2, rel=0.01)  # Speeds add.
    assert apart.waiting == 0
    assert apart.staleness_mean == pytest.approx(3, rel=0.05)
    backup = simulate_servers(bsp(backup=1), costs(STRAGGLER))
    assert backup.step_s == pytest.approx(1.0)
    assert backup.used == 0.75


@pytest.mark.parametrize("s", [0, 1, 3, 10])
def test_no_read_is_further_ahead_than_the_bound(s: int) -> None:
    found = simulate_servers(ssp(s), costs(STRAGGLER), steps=100)
    assert max(found.ahead) == s
    assert max(found.staleness) <= s
    if s == 0:
        assert found.step_s == pytest.approx(5.0)
    calm = simulate_servers(ssp(s), costs(EQUAL), steps=100)
    assert calm.step_s == pytest.approx(1.0)


@pytest.mark.parametrize("rule", [ssp(3), asp(), softsync(2)], ids=str)
def test_slow_moments_of_all_cost_less_where_nobody_waits_for_all(rule: Served) -> None:
    together = simulate_servers(bsp(), costs(EQUAL), noise=0.5, seed=1, steps=200)
    assert simulate_servers(rule, costs(EQUAL), noise=0.5, seed=1, steps=200).step_s < 0.97 * together.step_s
    if isinstance(rule, softsync):
        assert max(simulate_servers(rule, costs(STRAGGLER), steps=100).staleness) <= 2 * rule.k


def test_more_shards_carry_more_pushes() -> None:
    narrow, wide = (simulate_servers(asp(), costs(EQUAL, push_s=1.0, pull_s=1.0, shards=n)) for n in (1, 4))
    assert narrow.step_s == pytest.approx(4.0, rel=0.02)  # The one link into the servers is always busy.
    assert wide.step_s < 0.8 * narrow.step_s


def test_a_strategy_with_servers_is_simulated_on_a_cluster() -> None:
    found = {
        sync: simulate(
            "gpt:125m", f"dp(8, sync={sync}, via=ps(4))", cluster="dgx-a100", batch=64, straggler=["rank 2: 3x"]
        )
        for sync in ("bsp()", "asp()")
    }
    assert all(isinstance(each, SimulatedServers) for each in found.values())
    assert found["bsp()"].step_s > 2.9 * found["bsp()"].undisturbed_s  # type: ignore[operator]
    assert found["asp()"].step_s < 1.2 * found["asp()"].undisturbed_s
    assert found["asp()"].steps_factor > found["bsp()"].steps_factor == 1.0  # type: ignore[union-attr]
    dense, small = (
        simulate("gpt:125m", f"dp(8, sync=asp(), via=ps(4), compress={c})", cluster="dgx-a100", batch=64)
        for c in ("none()", "topk(0.01)")
    )
    assert small.report["push_s"] < 0.05 * dense.report["push_s"]
    assert small.report["pull_s"] == dense.report["pull_s"]
