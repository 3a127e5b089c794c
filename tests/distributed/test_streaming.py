"""DiLoCo in fragments, overlapped, eager, with other merges and weights: identities, simulations, ledgers, faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.test_islands import PROVE, limit, proven
from shoal.launch import RankFailed

Ranks = Callable[..., list[Any]]

STREAMING = [
    ("plain", "dp(2, sync=diloco(4, fragments=2))"),
    ("uneven", "dp(2, sync=diloco(3, fragments=3, overlap=1))"),
    ("norm", "dp(2, sync=diloco(4, fragments=2, overlap=3, blend=0.5))"),
    ("plain", "dp(2, sync=diloco(2, overlap=1))"),
    ("plain", "dp(2, sync=diloco(2, eager=True))"),
    ("uneven", "dp(2, sync=diloco(3, fragments=2, eager=True))"),
    ("plain", 'dp(2, sync=diloco(2, merge="radial"))'),
    ("uneven", 'dp(2, sync=diloco(4, fragments=2, overlap=1, blend=0.5, merge="radial", weight="equal"))'),
    ("uneven", 'dp(2, sync=diloco(2, weight="tokens2/steps"))'),
    ("dropout", "dp(2, sync=diloco(3, fragments=2))"),
    ("unused", "dp(2, sync=diloco(2, fragments=2, overlap=1))"),
]
COMPOSED = [
    ("plain", "dp(2, sync=diloco(4, fragments=2, overlap=1)) * dp(2, zero=3)"),
    ("plain", 'dp(2, sync=diloco(2, merge="radial")) * dp(2, zero=1)'),
    ("plain", 'dp(2, sync=diloco(3, fragments=2, merge="radial")) * tp(2)'),
    ("plain", 'dp(2, sync=diloco(3, fragments=2, eager=True, merge="radial")) * pp(2, "1f1b", micro=3)'),
    ("plain", "dp(4, sync=diloco(2, fragments=2, overlap=1, blend=0.5))"),
]
NAMED = [
    ("plain", "dp(2, sync=diloco(4)) * dp(2, zero=3)"),
    ("plain", 'dp(2, sync=diloco(4)) * pp(2, "1f1b", micro=4)'),
]
IDENTITIES = [
    ("plain", "dp(2, sync=diloco(3, fragments=1, overlap=0, blend=0.0))", "dp(2, sync=diloco(3))"),
    ("plain", "dp(2, sync=diloco(3, lr=1.0, momentum=0.0, blend=0.0))", "dp(2, sync=local(3))"),
    ("sgd", "dp(2, sync=diloco(1, lr=1.0, momentum=0.0))", "dp(2)"),
    ("plain", "dp(2, sync=diloco(3, fragments=2))", "dp(2, sync=diloco(3))"),
    ("plain", "dp(2, sync=diloco(3, eager=True))", "dp(2, sync=diloco(3))"),
]
"""The last two are not the same."""


def test_streams_train_as_their_simulation(ranks: Ranks) -> None:
    for case, difference in zip(STREAMING, proven(ranks, STREAMING, world=2), strict=True):
        assert difference < limit(case), case


def test_streams_of_islands_of_several_ranks_train_as_their_simulation(ranks: Ranks) -> None:
    for case, difference in zip(COMPOSED, proven(ranks, COMPOSED, world=4), strict=True):
        assert difference < limit(case), case


def test_compositions_that_the_documentation_names_train_as_their_simulation(ranks: Ranks) -> None:
    for case, difference in zip(NAMED, proven(ranks, NAMED, world=4), strict=True):
        assert difference < limit(case), case


@pytest.mark.slow
def test_four_islands_of_two_ranks_train_as_their_simulation(ranks: Ranks) -> None:
    case = [("plain", "dp(4, sync=local(4)) * tp(2)")]
    assert proven(ranks, case, world=8)[0] < 1e-10


START = [
    ("plain", "dp(2, sync=local(3, start=2))"),
    ("norm", "dp(2, sync=local(2, start=3))"),
    ("uneven", "dp(2, sync=local(3, start=4))"),
    ("unused", "dp(2, sync=local(3, start=2))"),
    ("plain", 'dp(2, sync=local(2, state="reset"))'),
    ("uneven", 'dp(2, sync=diloco(3, state="reset"))'),
    ("momentum", 'dp(2, sync=bmuf(2, state="reset"))'),
]


def test_a_synchronous_start_and_reset_optimisers_train_as_their_simulation(ranks: Ranks) -> None:
    for case, difference in zip(START, proven(ranks, START, world=2), strict=True):
        assert difference < limit(case), case
    inner = [(job, f"{text} * dp(2, zero=3)") for job, text in START[:1]]
    inner += [("plain", 'dp(2, sync=local(3, start=2, state="reset")) * pp(2, "1f1b", micro=3)')]
    for case, difference in zip(inner, proven(ranks, inner, world=4), strict=True):
        assert difference < limit(case), case


def test_islands_that_start_synchronously_are_the_synchronous_run_until_then(ranks: Ranks) -> None:
    asked = {"cases": [("plain", "dp(2, sync=local(3, start=7))", "dp(2)")], "steps": 7}
    for [row] in ranks(PROVE, asked, ranks=2):
        assert row["difference"] < 1e-10


def test_muon_inside_diloco_trains_as_its_simulation(ranks: Ranks) -> None:
    """MuLoCo."""
    cases = [("matrices", "dp(2, sync=diloco(3))"), ("matrices", "dp(2, sync=diloco(2, fragments=2, overlap=1))")]
    for case, difference in zip(cases, proven(ranks, cases, world=2), strict=True):
        assert difference < limit(case), case


def test_streams_are_diloco_where_their_formulas_are(ranks: Ranks) -> None:
    *same, fragments, eager = zip(*ranks(PROVE, {"cases": IDENTITIES, "steps": 7}, ranks=2), strict=True)
    for case, rows in zip(IDENTITIES, same, strict=False):
        assert max(row["difference"] for row in rows if "gradient" not in row["where"]) < 1e-10, case
    for rows in (fragments, eager):
        assert max(row["difference"] for row in rows) > 1e-6


def test_one_eager_island_is_one_island_of_diloco(ranks: Ranks) -> None:
    asked = {"cases": [("plain", "dp(1, sync=diloco(3, eager=True))", "dp(1, sync=diloco(3))")], "steps": 7}
    [[row]] = ranks(PROVE, asked, ranks=1)
    assert row["difference"] < 1e-10


@pytest.mark.parametrize(
    ("strategy", "world", "at"),
    [
        ("dp(2, sync=diloco(4, fragments=2, overlap=1, blend=0.5))", 2, 5),
        ("dp(2, sync=diloco(4, eager=True))", 2, 6),
        ("dp(2, sync=diloco(4, fragments=2, overlap=3)) * dp(2, zero=3)", 4, 6),
    ],
)
def test_a_run_resumed_with_rounds_on_the_wire_is_the_same_to_the_bit(
    ranks: Ranks, tmp_path: Path, strategy: str, world: int, at: int
) -> None:
    asked = {"job": "norm", "strategy": strategy, "at": at, "steps": 11, "folder": str(tmp_path)}
    for row in ranks("distributed.island_targets:resumed", asked, ranks=world):
        assert row["more"] == row["then"]
        assert row["same"]


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("ends_exchanged", "dp(2, sync=diloco(2, overlap=1, blend=0.2))"),
        ("one_round_behind", "dp(2, sync=diloco(2))"),
        ("wrong_sign", "dp(2, sync=diloco(2, fragments=2, overlap=1))"),
    ],
)
def test_faults_of_public_implementations_are_found(ranks: Ranks, fault: str, strategy: str) -> None:
    case = [("plain", strategy)]
    assert proven(ranks, case, world=2, target=f"distributed.island_targets:{fault}")[0] > 1e-6


def test_fragments_in_different_order_end_in_a_sentence(ranks: Ranks) -> None:
    case = [("plain", "dp(2, sync=diloco(2, fragments=2))")]
    with pytest.raises(RankFailed, match="fragment"):
        proven(ranks, case, world=2, target="distributed.island_targets:fragments_in_another_order")
