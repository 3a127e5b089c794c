"""The traffic of attention over a cut sequence, against totals written down independently of the formulas."""

from __future__ import annotations

import pytest

from shoal.comm.ledger import Entry, Key, ledger_of
from shoal.estimate.attention_traffic import attention_calls
from shoal.estimate.traffic import Group
from shoal.layout.attention import AttentionCall

B, H, KV, L, D = 2, 8, 2, 64, 16
"""L counts one rank's positions."""


def call(itemsize: int = 4, **changes: int) -> AttentionCall:
    sizes = {"batch": B, "heads": H, "kv_heads": KV, "length": L, "head_dim": D, "value_dim": D, "itemsize": itemsize}
    return AttentionCall(**(sizes | changes))


def entries(method: str, ranks: int, itemsize: int = 4, *, recomputed: bool = False, **how: bool) -> dict[Key, Entry]:
    group = Group(axis="cp", ranks=ranks)
    made = [call(itemsize, **how), *([call(itemsize, again=True)] if recomputed else [])]
    return dict(ledger_of(attention_calls(made, method, group)).entries)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_ring_sends_keys_and_values_forward_and_twice_that_backward(ranks: int) -> None:
    keys = B * KV * L * D * 4
    hops = ranks - 1
    assert entries("ring", ranks) == {
        Key("cp", "forward", "send"): Entry(hops, hops, hops * 2 * keys),
        Key("cp", "forward", "recv"): Entry(hops, 0, 0),
        Key("cp", "backward", "send"): Entry(2 * hops, 2 * hops, hops * 4 * keys),
        Key("cp", "backward", "recv"): Entry(2 * hops, 0, 0),
    }


def test_half_precision_keys_have_their_gradients_summed_in_float32() -> None:
    half = entries("ring", 2, itemsize=2)
    keys = B * KV * L * D
    assert half[Key("cp", "forward", "send")].bytes == 2 * keys * 2
    assert half[Key("cp", "backward", "send")].bytes == 2 * keys * 2 + 2 * keys * 4
    double = entries("ring", 2, itemsize=8)
    assert double[Key("cp", "backward", "send")].bytes == 2 * double[Key("cp", "forward", "send")].bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_exchanges_all_inputs_at_once_and_the_output_once(ranks: int) -> None:
    inputs, output = B * (H + 2 * KV) * L * D * 4, B * H * L * D * 4
    each = Entry(2, 2 * (ranks - 1), (inputs + output) * (ranks - 1) // ranks)
    assert entries("ulysses", ranks) == {
        Key("cp", "forward", "all_to_all"): each,
        Key("cp", "backward", "all_to_all"): each,
    }


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_recomputation_repeats_forward_inside_backward(method: str) -> None:
    once, again = entries(method, 4), entries(method, 4, recomputed=True)
    for key, entry in again.items():
        extra = once[Key("cp", "forward", key.kind)] if key.phase == "backward" else Entry()
        assert entry == once[key] + extra


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_evaluation_has_no_backward_and_one_rank_no_traffic(method: str) -> None:
    assert {key.phase for key in entries(method, 4, evaluating=True)} == {"evaluate"}
    assert entries(method, 1) == {}


def test_values_of_another_width_count_with_their_own() -> None:
    narrow = attention_calls([call(value_dim=D // 2)], "ring", Group(axis="cp", ranks=2))
    assert next(narrow)[3] == B * KV * L * (D + D // 2) * 4
