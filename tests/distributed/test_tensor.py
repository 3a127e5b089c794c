"""Tensor parallelism on real ranks: outputs and every gradient equal those of the uncut model, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distributed.tensor_models import CASES, HEAD, WIDTH
from shoal.comm.choice import on_one_host
from shoal.comm.ledger import Ledger, ledger_of
from shoal.estimate.traffic import Group
from tensor_forms import region_calls, stream_calls, vocabulary_calls

EXACT = 1e-12
Ranks = Callable[..., Any]

HERE = "distributed.tensor_targets"
DEGREES = {"grouped": (2, 4), "planes": (2, 3), "library": (2, 3), "fused": (2, 3), "mlp": (2, 3)}


@pytest.mark.parametrize(("case", "world"), [(c, n) for c in CASES for n in DEGREES.get(c, (2,))])
def test_a_cut_model_computes_what_the_whole_one_does(ranks: Ranks, case: str, world: int) -> None:
    for found in ranks(f"{HERE}:case", {"case": case}, ranks=world):
        for what in ("output", "gradient", "input", "buffer", "evaluation"):
            assert found[what] <= EXACT, what
        assert found["ledger"] == []
        assert found["cuts"]
        assert found["partial"] == []


DECODERS: dict[str, dict[str, Any]] = {
    "odd vocabulary": {},
    "tied": {"tied": True},
    "logits gathered": {"loss_parallel": False},
    "weights, smoothing, padding": {"loss": {"label_smoothing": 0.1}, "weighted": True, "padding": 3},
    "recomputed": {"recompute": "full"},
    "selectively recomputed": {"recompute": "selective", "tied": True},
    "norm after the row, recomputed": {"recompute": "full", "block": "PostNorm"},
    "partial gradients listed": {"listed": True, "recompute": "full"},
    "sequence": {"between": "sequence"},
    "sequence, samples and positions flattened": {"between": "sequence", "entries": False, "block": "Flat"},
    "sequence, tied": {"between": "sequence", "tied": True, "loss": {"reduction": "sum"}},
    "sequence, columns gather": {"between": "sequence", "entries": False},
    "sequence, recomputed": {"between": "sequence", "recompute": "full"},
    "sequence, columns gather, selectively recomputed": {
        "between": "sequence",
        "entries": False,
        "recompute": "selective",
    },
    "sequence, norm after the row, selectively recomputed": {
        "between": "sequence",
        "recompute": "selective",
        "block": "PostNorm",
    },
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_cut_language_model_has_the_loss_and_the_gradients_of_the_whole_one(ranks: Ranks, name: str) -> None:
    settings = DECODERS[name]
    found = ranks(f"{HERE}:decoder", settings, ranks=2)
    for rank in found:
        assert rank["worst"] <= EXACT, rank["where"]
        assert rank["ledger"] == []
        assert rank["tied"] == settings.get("tied", False)
    assert [rank["rows"] for rank in found] == [129, 128]


@pytest.mark.parametrize(("world", "words"), [(4, 257), (4, 258)])
@pytest.mark.parametrize("between", ["whole", "sequence"])
def test_four_ranks_share_a_vocabulary_that_does_not_divide(ranks: Ranks, world: int, words: int, between: str) -> None:
    settings = {"between": between, "words": words, "tied": True, "recompute": "full"}
    found = ranks(f"{HERE}:decoder", settings, ranks=world)
    assert max(rank["worst"] for rank in found) <= EXACT
    assert sum(rank["rows"] for rank in found) == words
    assert max(rank["rows"] for rank in found) - min(rank["rows"] for rank in found) == 1
    assert all(rank["ledger"] == [] for rank in found)


STREAM = 2 * 12 * WIDTH * 8
ROWS = 2 * 12


def closed(between: Any, *, again: str = "", world: int = 2, listed: bool = False) -> Ledger:
    """What the decoder must send, from its shapes alone. `again`: which rows recomputation reaches."""
    tp = Group(axis="tp", ranks=world)
    calls = [*vocabulary_calls(tp, embedding_bytes=STREAM, head_bytes=STREAM, loss_rows=ROWS, loss_itemsize=8)]
    for _ in range(2):
        for region in ("attention", "mlp"):
            # The norm of a head is whole; with the sequence cut its gradient is summed with all others, later.
            norm = [HEAD * 8] if region == "attention" and between == "whole" and not listed else []
            calls += region_calls(
                tp,
                between=between,
                input_bytes=[STREAM],
                output_bytes=[STREAM],
                inside_bytes=norm,
                recomputed_inputs=bool(again),
                recomputed_outputs=region in again,
            )
    return ledger_of([*calls, *(stream_calls(tp, stream_bytes=STREAM) if between == "sequence" else ())], on_one_host)


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({}, ""),
        ({"recompute": "full"}, "attention"),
        ({"recompute": "selective"}, "attention"),
        ({"recompute": "full", "block": "PostNorm"}, "attention mlp"),
    ],
)
@pytest.mark.parametrize("between", ["whole", "sequence"])
def test_what_is_sent_follows_from_the_shapes_alone(
    ranks: Ranks, between: str, settings: dict[str, Any], again: str
) -> None:
    for rank in ranks(f"{HERE}:decoder", {"between": between, **settings}, ranks=2):
        assert Ledger.from_json(rank["counted"]).differences(closed(between, again=again)) == []


def test_cutting_the_sequence_moves_the_bytes_that_a_whole_stream_moves_but_for_its_ends() -> None:
    whole = sum(entry.bytes for entry in closed("whole").entries.values()) - 2 * 2 * HEAD * 8 // 2
    cut = sum(entry.bytes for entry in closed("sequence").entries.values())
    assert cut - whole == 2 * STREAM // 2


def test_with_the_sequence_cut_everything_whole_in_the_blocks_is_partial_and_nothing_else(ranks: Ranks) -> None:
    whole = (
        "attention.out.bias",
        "attention.q_norm.weight",
        "mlp.down.bias",
        "norm1.bias",
        "norm1.weight",
        "norm2.bias",
        "norm2.weight",
    )
    for rank in ranks(f"{HERE}:decoder", {"between": "sequence"}, ranks=2):
        assert rank["partial"] == [f"blocks.{n}.{name}" for n in range(2) for name in whole]


def test_a_partial_gradient_that_the_plan_lists_is_left_to_the_caller(ranks: Ranks) -> None:
    for rank in ranks(f"{HERE}:decoder", {"listed": True}, ranks=2):
        assert rank["partial"] == [f"blocks.{n}.attention.q_norm.weight" for n in range(2)]
        assert rank["worst"] <= EXACT
        assert Ledger.from_json(rank["counted"]).differences(closed("whole", listed=True)) == []


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_librarys_encoder_with_its_sequence_cut(ranks: Ranks, batch_first: bool, world: int) -> None:
    found = ranks(f"{HERE}:library_sequence", {"batch_first": batch_first}, ranks=world)
    assert max(rank["worst"] for rank in found) <= EXACT


@pytest.mark.parametrize("world", [2, 3])
def test_multihead_attention_in_every_way_it_may_be_called(ranks: Ranks, world: int) -> None:
    for found in ranks(f"{HERE}:attention", ranks=world):
        assert len(found) == 32
        assert {name: off for name, off in found.items() if off > EXACT} == {}


@pytest.mark.parametrize("world", [2, 4])
def test_samples_dealt_out_and_wide_layers_cut_on_the_same_ranks(ranks: Ranks, world: int) -> None:
    tp = Group(axis="tp", ranks=world)
    expected = ledger_of(
        region_calls(tp, between="batch", input_bytes=[2 * world * 96 * 8], output_bytes=[2 * world * WIDTH * 8]),
        on_one_host,
    )
    for rank in ranks(f"{HERE}:batch", ranks=world):
        assert rank["worst"] <= EXACT
        assert rank["ledger"] == []
        assert Ledger.from_json(rank["counted"]).differences(expected) == []
        assert rank["cuts"] == ["down.weight", "up.bias", "up.weight"]
        assert rank["partial"] == [
            "conv.bias",
            "conv.weight",
            "down.bias",
            "last.bias",
            "last.weight",
            "norm.bias",
            "norm.weight",
        ]


@pytest.mark.parametrize("between", ["whole", "sequence"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_models_of_the_transformers_library_with_their_own_loss(ranks: Ranks, family: str, between: str) -> None:
    pytest.importorskip("transformers")
    settings = {"family": family, "between": between, "recompute": "selective" if between == "sequence" else None}
    for rank in ranks(f"{HERE}:library_model", settings, ranks=2):
        assert rank["worst"] <= EXACT, rank["where"]
        assert rank["ledger"] == []
        assert rank["same_words"]
        assert rank["stays_cut"]


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_and_their_gradients_in_every_dimension_and_precision(ranks: Ranks, world: int) -> None:
    for found in ranks("distributed.tensor_edges:collectives", ranks=world):
        assert len(found) == 79
        assert [name for name, right in found.items() if not right] == []


def test_columns_share_one_reduction_and_nothing_outlives_its_use(ranks: Ranks) -> None:
    for found in ranks("distributed.tensor_edges:one_reduction", ranks=2):
        # Two passes, each: attention's three columns, the norm of their heads, the mlp's column; and attention's sum,
        # where it is computed again.
        for how, calls in (("None", 6), ("full", 8), ("selective", 8)):
            assert found[how] == {"calls": {"tp/backward/all_reduce": calls}, "alive": 0}
        assert found["after evaluation"] == 0


@pytest.mark.parametrize("between", ["whole", "sequence"])
def test_bfloat16_crosses_the_wire_in_half_the_bytes(ranks: Ranks, between: str) -> None:
    for found in ranks(f"{HERE}:autocast", {"between": between, "recompute": "full"}, ranks=2):
        for low in (True, False):
            assert found[f"ledger {low}"] == []
            assert found[f"float32 {low}"]
        assert found["loss True"] <= 1e-2
        assert found["gradient True"] <= 0.1
        assert found["loss False"] <= 1e-5
        assert found["gradient False"] <= 1e-4
        assert found["bytes True"] < (0.62 if between == "whole" else 0.75) * found["bytes False"]


def test_what_does_not_fit_is_refused_in_a_sentence(ranks: Ranks) -> None:
    words = {
        "parts": "3 parts, which do not divide among 2 ranks",
        "name": "'upp.weight'",
        "shape": "[48, 24]",
        "module": "'dwn'",
        "scaled": "nothing",
        "bias_k": "add_bias_kv",
        "zero attention": "add_zero_attn",
        "sequence": "blocks.0.mix adds along it",
        "weights used": "need_weights=False",
        "weights in a sum": "need_weights=False",
        "mask": "[3, 3]",
        "leak": "part of its gradient",
        "leak of frozen parameters": "part of its gradient",
        "max_norm": "max_norm",
        "scale_grad_by_freq": "scale_grad_by_freq",
        "word": "word 8 is out of range",
        "negative word": "word -1",
        "too few": "too little",
        "length": "11 does not divide",
        "samples": "7 does not divide",
    }
    for said in ranks("distributed.tensor_edges:refusals", ranks=2):
        assert set(said) == set(words)
        assert [name for name, part in words.items() if part not in said[name]] == []


FAULTS = [
    ("unreduced_norm", {"between": "sequence"}, "norm"),
    ("untied", {"tied": True}, "words.weight"),
    ("unsummed_input_gradient", {}, ""),
    ("bias_from_every_rank", {}, ""),
]


@pytest.mark.parametrize(("fault", "settings", "where"), FAULTS, ids=lambda value: str(value))
def test_a_planted_fault_shows_in_the_numbers(ranks: Ranks, fault: str, settings: dict[str, Any], where: str) -> None:
    for rank in ranks("distributed.tensor_faults:no_fault", {"decoder": settings}, ranks=2):
        assert rank["worst"] <= EXACT
    for rank in ranks(f"distributed.tensor_faults:{fault}", {"decoder": settings}, ranks=2):
        assert rank["worst"] > 1e-3
        assert where in rank["where"]
        # The fault sends what an honest run sends: only the numbers give it away.
        assert rank["ledger"] == []
