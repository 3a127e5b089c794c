"""Attention over a sequence cut among real ranks equals the library's on the whole one, in all of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shoal.comm.choice import on_one_host
from shoal.comm.ledger import Ledger, ledger_of
from shoal.estimate.attention_traffic import attention_calls
from shoal.estimate.traffic import Group
from shoal.layout.attention import AttentionCall

Ranks = Callable[..., list[Any]]

TARGETS = "distributed.attention_targets"
BOUNDS = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 0.04, "float16": 0.01}
"""The half precisions round each rank's share of an output once more than the library does."""
FAR = 1e-3

MASKS = ["bool", "per head", "float", "two dimensions", "three dimensions", "causal", "padding", "lowest", "-inf"]
CUTS = [{"causal": causal, "balanced": balanced} for causal, balanced in product([False, True], repeat=2)]
RING = [
    *({**cut, "D": width} for cut in CUTS for width in (8, 7)),
    *({**cut, "kv": heads} for cut in CUTS for heads in (1, 2)),
    *({**cut, "dtype": dtype} for cut in CUTS for dtype in ("float32", "bfloat16", "float16")),
    *({"mask": mask, "balanced": balanced, "kv": kv} for mask in MASKS for balanced in (True, False) for kv in (4, 2)),
    *({"mask": mask, "causal": True, "balanced": True} for mask in ("bool", "float", "padding", "-inf")),
    *({"mask": mask, "dtype": dtype} for mask in ("bool", "float", "-inf") for dtype in ("float32", "bfloat16")),
    *({**cut, "layout": layout} for cut in CUTS for layout in ("heads last", "dimension first")),
    *({**cut, "Dv": 5, "kv": 2} for cut in CUTS),
    *({"mask": mask, "mask_gradient": True, "balanced": True} for mask in ("float", "two dimensions", "-inf")),
    {"mask": "three dimensions", "mask_gradient": True, "causal": True, "balanced": True, "kv": 2},
    {"B": 1, "H": 1, "causal": True, "balanced": True},
    {"scale": 0.3, "causal": True, "balanced": True},
    {"big": 30.0, "causal": True, "balanced": True},
    {"big": 30.0, "mask": "float"},
    {"D": 1, "causal": True, "balanced": True},
]
ULYSSES = [
    {"method": "ulysses", "H": 12, **case}
    for case in [
        *({"causal": causal, "D": width} for causal in (False, True) for width in (8, 7)),
        *({"causal": True, "dtype": dtype} for dtype in ("float32", "bfloat16", "float16")),
        *({"mask": mask} for mask in MASKS),
        {"causal": True, "layout": "dimension first"},
        {"causal": True, "Dv": 5},
        {"causal": True, "scale": 0.3, "B": 1},
        {"mask": "three dimensions", "mask_gradient": True},
        {"mask": "float", "mask_gradient": True},
    ]
]


def shortest(ranks: int) -> list[dict[str, Any]]:
    """Chunks of a single position."""
    return [
        *({"L": 2 * ranks, "balanced": True, **more} for more in ({"causal": True}, {"mask": "bool"}, {})),
        *({"L": ranks, **more} for more in ({"causal": True}, {"mask": "bool"}, {}, {"dtype": "bfloat16"})),
        {"L": ranks, "method": "ulysses", "H": ranks, "causal": True},
    ]


def differences(cases: list[dict[str, Any]], everyone: list[Any]) -> list[str]:
    """The cases in which some rank's output or gradient is farther off than its type allows."""
    wrong = []
    for number, case in enumerate(cases):
        for rank, results in enumerate(everyone):
            for what, difference in results[number]["found"].items():
                if not difference <= BOUNDS[case.get("dtype", "float64")]:
                    wrong.append(f"{case}, rank {rank}: {what} differs by {difference:g}")
    return wrong


def predicted(case: dict[str, Any], ranks: int) -> Ledger:
    c = {"B": 2, "H": 4, "L": 24, "D": 8, "dtype": "float64", "method": "ring", **case}
    itemsize = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}[c["dtype"]]
    call = AttentionCall(
        batch=c["B"],
        heads=c["H"],
        kv_heads=c.get("kv") or c["H"],
        length=c["L"] // ranks,
        head_dim=c["D"],
        value_dim=c.get("Dv") or c["D"],
        itemsize=itemsize,
    )
    group = Group(axis="cp", ranks=ranks)
    made = [call, *([replace(call, again=True)] if c.get("recompute") else [])]
    return ledger_of(attention_calls(made, c["method"], group), on_one_host)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_cut_attention_equals_whole_attention_and_sends_what_the_formula_says(ranks: Ranks, world: int) -> None:
    grouped = [
        {"method": "ulysses", "H": 2 * heads, "kv": heads, "causal": causal, "mask": mask}
        for heads in (world, 2 * world)
        for causal, mask in ((True, None), (False, "per head"))
    ]
    cases = [*RING, *ULYSSES, *grouped, *shortest(world)]
    everyone = ranks(f"{TARGETS}:sweep", {"cases": cases}, ranks=world)
    assert differences(cases, everyone) == []
    for results in everyone:
        for case, result in zip(cases, results, strict=True):
            counted = Ledger.from_json(result["ledger"])
            assert predicted(case, world).differences(counted) == [], case
            assert result["dtype"] == f"torch.{case.get('dtype', 'float64')}"
            assert result["heads_side_by_side"], case


def test_matrix_products_serve_where_the_fused_kernel_does_not(ranks: Ranks) -> None:
    cases = [*RING, *shortest(3)]
    everyone = ranks(f"{TARGETS}:sweep", {"cases": cases, "plain": True}, ranks=3)
    assert differences(cases, everyone) == []


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_number_and_enters_its_exchanges_in_backward(ranks: Ranks, mode: str) -> None:
    cases = [
        {"causal": True, "balanced": True, "recompute": mode},
        {"mask": "-inf", "recompute": mode, "kv": 2},
        {"mask": "bool", "Dv": 5, "recompute": mode},
        {"method": "ulysses", "causal": True, "recompute": mode},
    ]
    everyone = ranks(f"{TARGETS}:sweep", {"cases": cases}, ranks=2)
    assert differences(cases, everyone) == []
    for results in everyone:
        for case, result in zip(cases, results, strict=True):
            assert predicted(case, 2).differences(Ledger.from_json(result["ledger"])) == [], case


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("how", [{"causal": True}, {"mask": "causal"}], ids=["is_causal", "a mask"])
def test_every_rank_of_a_balanced_causal_ring_computes_equally_many_products(
    ranks: Ranks, world: int, how: dict[str, Any]
) -> None:
    counted = ranks(f"{TARGETS}:products", {"case": {"L": 24, "balanced": True, **how}}, ranks=world)
    # Two products with each visitor, forward and backward; on its own diagonal two by two, or half of that.
    own = 2.0 if "causal" in how else 4.0
    for each in counted:
        assert each["forward"] == [own, *[2.0] * (world - 1)]
        assert each["backward"] == [*[2.0] * (world - 1), own]


def test_without_balance_causal_work_is_uneven(ranks: Ranks) -> None:
    counted = ranks(f"{TARGETS}:products", {"case": {"L": 24, "causal": True, "balanced": False}}, ranks=3)
    assert [sum(each["forward"]) for each in counted] == [2.0, 6.0, 10.0]


@pytest.mark.parametrize("fault", ["forget_one_causal_mask", "attend_to_one_future_chunk"])
def test_a_ring_that_sees_the_future_in_one_chunk_is_far_off(ranks: Ranks, fault: str) -> None:
    cases = [{"causal": True, "balanced": True}, {"causal": True, "balanced": True, "L": 240, "dtype": "float32"}]
    everyone = ranks(f"{TARGETS}:sweep", {"cases": cases, "fault": fault, "index": 1}, ranks=3)
    for number in range(len(cases)):
        honest, faulty = everyone[0][number]["found"], everyone[1][number]["found"]
        assert faulty["output"] > FAR
        assert faulty["q"] > FAR
        # Rank 0's own rows are right; the gradients of its keys are not where the fault reaches them.
        assert honest["output"] < 1e-5
        assert max(found[number]["found"]["k"] for found in everyone) > FAR


def test_impossible_calls_are_refused_in_a_sentence_before_anything_is_sent(ranks: Ranks) -> None:
    words = {
        "dropout": "dropout_p is a probability from 0 to 1, not 1.5",
        "dropout of ulysses": "not -0.1",
        "cross": "Cross attention and cached keys",
        "three dimensions": "[batch, heads, positions, head_dim]",
        "grouped without saying so": "4 heads of queries do not go with 2 of keys and values; pass enable_gqa=True",
        "odd groups": "4 heads of queries do not go with 3",
        "types": "torch.float32, torch.float64 and torch.float32",
        "integers": "floating-point",
        "odd length": "6 positions cannot be cut into two equal chunks on each of 2 ranks",
        "rows of everyone": "6 rows, 12 columns]: the rows that this rank holds",
        "own columns only": "6 rows, 12 columns]",
        "integer mask": "not torch.int64",
        "own rows": "12 rows, 12 columns]: the rows of the full sequence",
        "heads": "3 heads of queries do not divide by 2 ranks",
        "key heads": "1 heads of keys and values do not divide by 2 ranks",
        "balanced": "balanced=False",
    }
    for said in ranks(f"{TARGETS}:refusals", ranks=2):
        assert said.pop("sent") == "0"
        assert set(said) == set(words)
        for name, sentence in words.items():
            assert sentence in said[name], name


def test_evaluation_autocast_frozen_inputs_no_samples_and_a_ring_of_one(ranks: Ranks) -> None:
    for found in ranks(f"{TARGETS}:surroundings", ranks=2):
        for method in ("ring", "ulysses"):
            assert found[f"{method}: phases of evaluation"] == ["evaluate"]
            assert found[f"{method}: types under autocast"] == ["torch.bfloat16", "torch.float64"]
            assert found[f"{method}: twice"] < 1e-6
            assert found[f"{method}: no samples"] == [0, 2, 4, 8]
        assert found["alone"] == [True, True]
