"""The ledger of real steps beside totals worked out by hand from the model's size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., list[Any]]

WIDTH, BLOCKS = 64, 4
# Four layers of 64 x 64 weights and 64 biases in float32: multiples of 16 elements, so nothing is padded on two ranks.
MODEL_BYTES = 4 * BLOCKS * (WIDTH * WIDTH + WIDTH)
PARAMETERS = 2 * BLOCKS


def entries(ranks: Run, strategy: str, world: int = 2, **options: Any) -> dict[tuple[str, str, str], tuple[int, int]]:
    seen = ranks("distributed.engine_targets:traffic", {"strategy": strategy, **options}, ranks=world)
    assert all(rows == seen[0] for rows in seen), "every rank sends the same"
    return {(row["axis"], row["phase"], row["kind"]): (row["calls"], row["bytes"]) for row in seen[0]}


def loss(world: int = 2) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {("dp", "loss", "all_reduce"): (1, 2 * (5 + PARAMETERS) * 8 * (world - 1) // world)}


def test_stage_0_sends_the_model_once_there_and_once_back(ranks: Run) -> None:
    assert entries(ranks, "dp(2)", clip=1.0) == loss() | {("dp", "gradient", "all_reduce"): (1, MODEL_BYTES)}


@pytest.mark.parametrize(("zero", "scatters"), [(1, 1), (2, 3)])
def test_stages_1_and_2_scatter_gradients_and_gather_parameters(ranks: Run, zero: int, scatters: int) -> None:
    assert entries(ranks, f"dp(2, zero={zero})", micro=3, clip=1.0) == loss() | {
        ("dp", "gradient", "reduce_scatter"): (scatters, scatters * MODEL_BYTES // 2),
        ("dp", "optimizer", "all_gather"): (1, MODEL_BYTES // 2),
        ("dp", "optimizer", "all_reduce"): (1, 8),
    }


def test_stage_3_gathers_every_block_but_the_last_twice(ranks: Run) -> None:
    assert entries(ranks, "dp(2, zero=3)") == loss() | {
        ("dp", "gradient", "reduce_scatter"): (BLOCKS, MODEL_BYTES // 2),
        ("dp", "forward", "all_gather"): (BLOCKS, MODEL_BYTES // 2),
        ("dp", "backward", "all_gather"): (BLOCKS - 1, MODEL_BYTES // 2 * (BLOCKS - 1) // BLOCKS),
        ("dp", "optimizer", "all_reduce"): (1, 8),
    }


def test_an_outer_level_sends_only_its_shard(ranks: Run) -> None:
    found = entries(ranks, "dp(2) * dp(2, zero=1)", world=4)
    assert {key[1:]: value for key, value in found.items() if key[1] != "loss"} == {
        ("gradient", "reduce_scatter"): (1, MODEL_BYTES // 2),
        ("gradient", "all_reduce"): (1, MODEL_BYTES // 2),
        ("optimizer", "all_gather"): (1, MODEL_BYTES // 2),
        ("optimizer", "all_reduce"): (1, 8),
    }
    assert len({key[0] for key in found}) == 3, "two levels, and both together for the loss"


def test_a_single_rank_sends_nothing(ranks: Run) -> None:
    assert entries(ranks, "dp(1, zero=3)", world=1) == {}
