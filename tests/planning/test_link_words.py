"""Which period and which compression for a link: fast links need neither, slow ones both answers in words."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from shoal.cluster import cluster
from shoal.estimate.outer_calls import exchange_volume
from shoal.planning.candidates import of_strategies
from shoal.planning.link_words import link_words, server_shards
from shoal.planning.price import price_candidates
from shoal.planning.rank import Plan, make_plan, question_for
from shoal.shapes.presets import preset
from shoal.strategy import SyncTerm, diloco, gossip, local, parse

PERIODS = (8, 32, 128, 512)


@cache
def planned(bits_per_s: float, optimizer: str = "adamw") -> Plan:
    place = cluster("dgx-a100", devices=16)
    between = replace(place.levels[-1], bytes_per_s=bits_per_s / 8)
    place = replace(place, levels=(*place.levels[:-1], between))
    question = question_for(preset("gpt2:medium"), place, global_batch=512, sync=diloco(8), periods=PERIODS)
    return make_plan(replace(question, target=replace(question.target, optimizer=optimizer)))


def first(plan: Plan) -> tuple[int, int]:
    """Period and code of the best row."""
    rows = plan.priced.rows
    assert plan.best is not None
    return int(rows.local[plan.best]), int(rows.compress[plan.best])


def test_the_answer_follows_the_link() -> None:
    assert first(planned(2e11)) == (0, 0)
    fast, slow = planned(2e11), planned(5e7)
    assert link_words(fast)[-1].startswith("So: dense gradients in every step: ")
    period, _ = first(slow)
    assert period in PERIODS
    assert link_words(slow)[-1].startswith(f"So: islands that exchange every {period} steps")
    assert str(slow.strategy(slow.best or 0)) in link_words(slow)[-1]
    assert link_words(slow)[0] == "Links between nodes: 50 Mb/s for a device."


def test_slower_links_want_longer_periods() -> None:
    periods = [first(planned(rate))[0] for rate in (1e9, 1e8, 1e7)]
    assert periods == sorted(periods)
    assert periods[0] < periods[-1]


def test_an_exchange_is_shared_among_the_steps_of_its_period() -> None:
    plan = planned(1e8)
    rows, data_s = plan.priced.rows, plan.priced.split_s["data"]
    like = (rows.compress == 0) & (rows.zero == 0) & (rows.tp == 1) & (rows.pp == 1) & (rows.micro == 1)
    like &= (rows.outer == 2) & (rows.recompute == 0) & (rows.cp == 1)
    by_period = {steps: data_s[like & (rows.local == steps)] for steps in PERIODS}
    inside_s = by_period[512].min() - (by_period[8].min() - by_period[512].min()) / 63
    assert by_period[8].min() - inside_s == pytest.approx(16 * (by_period[128].min() - inside_s), rel=1e-6)


def test_muon_bears_local_steps_better() -> None:
    adam, muon = planned(5e7), planned(5e7, "muon")
    row = int(next(at for at in range(len(adam.priced)) if adam.priced.rows.local[at] == 512))
    assert muon.steps(row) < adam.steps(row)


def test_servers_take_in_and_give_out_all_models_while_workers_compute() -> None:
    assert server_shards(1e9, 8, bytes_per_s=1e9, compute_s=4.0) == 4
    assert server_shards(1e9, 8, bytes_per_s=1e12, compute_s=4.0) == 1


@pytest.mark.parametrize(
    ("rule", "volume"),
    [
        (local(8), 1.0),
        (diloco(8), 1.0),
        (diloco(8, fragments=4, overlap=1), 1.0),
        (gossip("ring", h=4), 2 / 1.75),
        (gossip("random", h=4), 1 / 1.75),
    ],
)
def test_a_rule_sends_what_it_says_in_a_period(rule: SyncTerm, volume: float) -> None:
    assert exchange_volume(rule, 8) == pytest.approx(volume, rel=1e-3)


@pytest.mark.parametrize("sync", ["local(8)", "diloco(8)", "bmuf(8)", "elastic(8, 0.1)", 'gossip("ring", h=8)'])
def test_islands_of_every_rule_have_an_estimate(sync: str) -> None:
    rows = of_strategies([parse(f"dp(2, sync={sync}) * dp(8)")], global_batch=64)
    place = cluster("dgx-a100", devices=16)
    assert rows.strategy(0) == parse(f"dp(2, sync={sync}) * dp(8)")
    (data_s,) = price_candidates(rows, shape=preset("gpt2:medium"), cluster=place).split_s["data"]
    assert data_s > 0


def test_exchanges_that_overlap_hide_behind_computing() -> None:
    place = cluster("dgx-a100", devices=16)
    texts = ["diloco(32)", "diloco(32, fragments=4)", "diloco(32, fragments=4, overlap=2)", "diloco(32, eager=True)"]
    found = []
    for sync in texts:
        rows = of_strategies([parse(f"dp(2, sync={sync}) * dp(8)")], global_batch=64)
        found.append(float(price_candidates(rows, shape=preset("gpt2:medium"), cluster=place).split_s["data"][0]))
    waits, parts, hidden, eager = found
    assert parts == pytest.approx(waits, rel=1e-3)
    assert hidden < parts
    assert eager < waits
