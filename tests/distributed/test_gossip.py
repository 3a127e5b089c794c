"""Gossip and elastic averaging: islands that stay different, held to a simulation of all of them in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.test_islands import proven
from distributed.test_lost_islands import LOOSE, lose
from shoal.job import load_job, share
from shoal.runtime.step import build_model

Ranks = Callable[..., list[Any]]
PROVE = "distributed.island_targets:prove_islands"
TARGETS = "distributed.gossip_targets"
TWO = [
    ("norm", "dp(2, sync=elastic(2, 0.3))"),
    ("uneven", "dp(2, sync=elastic(3, 0.4))"),
    ("momentum", "dp(2, sync=elastic(1, 0.25))"),
    ("norm", 'dp(2, sync=gossip("ring"))'),
    ("uneven", 'dp(2, sync=gossip("one-peer", "push-sum", h=2))'),
]
THREE = [
    ("norm", 'dp(3, sync=gossip("ring", h=2))'),
    ("dropout", 'dp(3, sync=gossip("exponential"))'),
    ("plain", 'dp(3, sync=gossip("random", h=2, momentum=0.5, lr=0.7))'),
    ("plain", 'dp(3, sync=gossip("random", momentum=0.5, lr=0.8, pull=0.8))'),
    ("plain", 'dp(3, sync=gossip("random", "push-sum"))'),
    ("norm", 'dp(3, sync=gossip("random", "push-sum", h=3))'),
    ("plain", "dp(3, sync=elastic(2, 0.3))"),
    ("unused", 'dp(3, sync=gossip("complete"))'),
]
FOUR = [
    ("plain", 'dp(4, sync=gossip("torus"))'),
    ("plain", 'dp(4, sync=gossip("one-peer"))'),
    ("plain", 'dp(4, sync=gossip("exponential", "push-sum"))'),
    ("plain", 'dp(4, sync=gossip("random"))'),
    ("plain", 'dp(2, sync=gossip("ring", h=2)) * dp(2, zero=3)'),
    ("plain", 'dp(2, sync=gossip("random", "push-sum")) * tp(2)'),
    ("plain", 'dp(2, sync=gossip("random", h=2, momentum=0.5)) * pp(2, "1f1b", micro=2)'),
    ("plain", "dp(2, sync=elastic(2, 0.4)) * dp(2, zero=1)"),
]


@pytest.mark.parametrize(("cases", "world"), [(TWO, 2), (THREE, 3), (FOUR, 4)])
def test_islands_that_stay_different_train_as_their_simulation(
    ranks: Ranks, cases: list[tuple[str, str]], world: int
) -> None:
    for case, difference in zip(cases, proven(ranks, cases, world=world), strict=True):
        assert difference < 1e-10, case


IDENTITIES = [
    ("sgd", 'dp(2, sync=gossip("complete"))', "dp(2)"),
    ("sgd", 'dp(2, sync=gossip("complete", "push-sum"))', "dp(2)"),
    ("plain", 'dp(2, sync=gossip("complete", h=3))', "dp(2, sync=local(3))"),
    ("plain", 'dp(2, sync=gossip("one-peer", h=2))', 'dp(2, sync=gossip("random", "push-sum", h=2))'),
    (
        "plain",
        'dp(2, sync=gossip("random", h=2, momentum=0.5))',
        'dp(2, sync=diloco(2, lr=1.0, momentum=0.5, form="heavy-ball"))',
    ),
    ("plain", 'dp(2, sync=gossip("random", h=2, momentum=0.5))', 'dp(2, sync=gossip("random", h=2, momentum=0.4))'),
]
"""A strategy, and one that is the same; the last is not."""


def test_gossip_is_another_scheme_where_their_formulas_agree(ranks: Ranks) -> None:
    *same, other = zip(*ranks(PROVE, {"cases": IDENTITIES, "steps": 7}, ranks=2), strict=True)
    for case, rows in zip(IDENTITIES, same, strict=False):
        assert max(row["difference"] for row in rows if "gradient" not in row["where"]) < 1e-10, case
    assert max(row["difference"] for row in other) > 1e-6


def test_a_complete_graph_of_four_is_the_synchronous_run_with_plain_sgd(ranks: Ranks) -> None:
    cases = [("sgd", 'dp(4, sync=gossip("complete"))', "dp(4)"), ("sgd", 'dp(4, sync=gossip("ring"))', "dp(4)")]
    complete, ring = zip(*ranks(PROVE, {"cases": cases, "steps": 6}, ranks=4), strict=True)
    assert max(row["difference"] for row in complete if "gradient" not in row["where"]) < 1e-10
    assert max(row["difference"] for row in ring) > 1e-6


def test_one_island_steps_by_itself(ranks: Ranks) -> None:
    cases = [
        ("sgd", 'dp(1, sync=gossip("one-peer"))', "serial"),
        ("sgd", 'dp(1, sync=gossip("ring", "async"))', "serial"),
        ("norm", "dp(1, sync=elastic(2, 0.5))", "dp(1, sync=elastic(2, 0.5))"),
    ]
    for case, rows in zip(cases, zip(*ranks(PROVE, {"cases": cases, "steps": 5}, ranks=1), strict=True), strict=True):
        assert max(row["difference"] for row in rows) < 1e-10, case


KEPT_MEANS = [
    'dp(4, sync=gossip("ring"))',
    'dp(4, sync=gossip("one-peer", h=2))',
    'dp(4, sync=gossip("random", "push-sum"))',
    'dp(4, sync=gossip("random", h=2))',
    "dp(4, sync=elastic(2, 0.2))",
]


def test_an_exchange_keeps_what_it_must_and_sends_to_neighbours_only(ranks: Ranks) -> None:
    """On real values: the mean of all islands; under push-sum, masses and weights; under elastic averaging, islands and
    centre together."""
    for text, rows in zip(
        KEPT_MEANS, zip(*ranks(f"{TARGETS}:kept_sums", KEPT_MEANS, ranks=4), strict=True), strict=True
    ):
        for row in rows:
            assert row["moved"] > 1e-3, text
            assert row["lost"] < 1e-13, text
            wanted = {"all_reduce"} if "elastic" in text else {"send", "recv"}
            assert set(row["kinds"]) == wanted, text
        if "push-sum" in text:
            assert len({row["weight"] for row in rows}) > 1, "weights that never differ test nothing"


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("wrong_weight", 'dp(4, sync=gossip("ring"))'),
        ("one_round_behind", 'dp(4, sync=gossip("ring"))'),
        ("skipped_neighbour", 'dp(4, sync=gossip("ring"))'),
        ("wrong_pull", "dp(4, sync=elastic(2, 0.2))"),
        ("weights_stay", 'dp(4, sync=gossip("random", "push-sum"))'),
    ],
)
def test_a_wrong_exchange_is_found(ranks: Ranks, fault: str, strategy: str) -> None:
    assert proven(ranks, [("plain", strategy)], world=4, target=f"{TARGETS}:{fault}")[0] > 1e-6


@pytest.mark.parametrize(
    ("strategy", "world", "at"),
    [
        ("dp(2, sync=elastic(4, 0.3))", 2, 4),
        ("dp(2, sync=elastic(4, 0.3)) * dp(2, zero=3)", 4, 6),
        ('dp(3, sync=gossip("ring"))', 3, 5),
        ('dp(3, sync=gossip("random", "push-sum", h=2))', 3, 5),
        ('dp(2, sync=gossip("random", h=3, momentum=0.5)) * dp(2, zero=1)', 4, 6),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(ranks: Ranks, tmp_path: Path, strategy: str, world: int, at: int) -> None:
    asked = {"job": "norm", "strategy": strategy, "at": at, "steps": 11, "folder": str(tmp_path)}
    for row in ranks("distributed.island_targets:resumed", asked, ranks=world):
        assert row["more"] == row["then"]
        assert row["same"]


@pytest.mark.parametrize("under", ["dp(3)", "dp(3, sync=local(4))"])
def test_any_strategy_goes_on_from_the_mean_of_a_gossip(ranks: Ranks, tmp_path: Path, under: str) -> None:
    asked = {
        "job": "plain",
        "strategy": 'dp(3, sync=gossip("ring"))',
        "at": 5,
        "steps": 8,
        "folder": str(tmp_path),
        "under": under,
    }
    rows = ranks("distributed.island_targets:resumed", asked, ranks=3)
    assert len(rows[0]["then"]) == 3
    assert under != "dp(3)" or rows[0]["then"] == rows[1]["then"]


def ring_that_loses_one() -> dict[str, torch.Tensor]:
    """D-PSGD of the loose job on a ring of four in plain PyTorch: island 2 ends before it sends in step 8. In that step
    its neighbours keep its weight themselves; from step 9 on there are three."""
    job = load_job(LOOSE)
    models = [build_model(job) for _ in range(4)]
    optimizers = [job.optimizer([{"params": list(model.parameters())}]) for model in models]
    third = 1 / 3
    ring = [[third, third, 0, third], [third, third, third, 0], [0, third, third, third], [third, 0, third, third]]
    alone = [[third, third, 0, third], [third, 2 * third, 0, 0], [0, 0, 1, 0], [third, 0, 0, 2 * third]]
    order, counter, left = job.order(), 0, [0, 1, 2, 3]
    for step in range(1, job.steps + 1):
        indices = order.indices(counter)
        counter = order.next(counter)
        for number, island in enumerate(left):
            batch = job.train.batch(share(indices, rank=number, ranks=len(left)))
            loss, count = job.loss(models[island](batch["x"]), batch)
            optimizers[island].zero_grad()
            (loss / count).backward()
            optimizers[island].step()
        left = left if step < 8 else [0, 1, 3]
        with torch.no_grad():
            for params in zip(*(model.parameters() for model in models), strict=True):
                before = [param.clone() for param in params]
                for i in left:
                    row = ring[i] if step < 8 else alone[i] if step == 8 else [third, third, 0, third]
                    params[i].copy_(sum(weight * each for weight, each in zip(row, before, strict=True)))
    states = [models[island].state_dict() for island in left]
    return {name: sum(state[name] for state in states) / len(left) for name in states[0]}


def test_a_ring_that_loses_an_island_is_the_simulation_of_it(ranks: Ranks, tmp_path: Path) -> None:
    _, _, values = lose(ranks, tmp_path, [(2, "step: forward", 8)], 'dp(4, sync=gossip("ring"))')
    for name, wanted in ring_that_loses_one().items():
        torch.testing.assert_close(values[name], wanted, rtol=1e-5, atol=1e-6)


def test_neighbours_of_a_killed_island_go_on_without_it(ranks: Ranks, tmp_path: Path) -> None:
    """Killed in step 8: its neighbours leave it out at once, all others when they save."""
    strategy = 'dp(4, sync=gossip("one-peer", "push-sum"))'
    results, heard, values = lose(ranks, tmp_path, [(2, "step: forward", 8)], strategy)
    assert [result is None for result in results] == [False, False, True, False]
    assert results[0]["status"] == "finished"
    assert [(loss["ranks"], loss["step"]) for loss in results[1]["lost"]] == [([2], 8)]
    assert [message["step"] for message in heard if message["event"] == "lost"] == [8]
    assert all(bool(value.isfinite().all()) for value in values.values())


def test_a_stop_reaches_all_islands_through_their_neighbours(ranks: Ranks) -> None:
    """Asked of one island in step 3, with five on a ring: all stop after the same step, without a collective."""
    rows = ranks(f"{TARGETS}:stopped", {"strategy": 'dp(5, sync=gossip("ring"))', "rank": 2, "at": 3}, ranks=5)
    assert {row["stopped"] for row in rows} == {5}
    assert {kind for row in rows for kind in row["kinds"]} <= {"send", "recv"}
