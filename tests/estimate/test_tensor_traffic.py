"""What tensor parallelism sends, by formula; tests/distributed/test_tensor.py holds it against real ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.comm.ledger import ledger_of
from shoal.estimate.tensor_traffic import SENDS, crossing_calls, gathered_logits_bytes
from shoal.estimate.traffic import Group
from shoal.layout.crossings import Crossing, Tally
from tensor_forms import region_calls, stream_calls, vocabulary_calls

TP = Group(axis="tp", ranks=4)


def test_a_region_between_whole_tensors_reduces_once_each_way() -> None:
    assert region_calls(TP, between="whole", input_bytes=[100], output_bytes=[60]) == (
        ("tp", "backward", "all_reduce", 100, 4),
        ("tp", "forward", "all_reduce", 60, 4),
    )


@pytest.mark.parametrize("between", ["sequence", "batch"])
def test_a_region_between_parts_gathers_and_scatters_each_way(between: str) -> None:
    assert set(region_calls(TP, between=between, input_bytes=[100], output_bytes=[60])) == {
        ("tp", "forward", "all_gather", 100, 4),
        ("tp", "backward", "reduce_scatter", 100, 4),
        ("tp", "forward", "reduce_scatter", 60, 4),
        ("tp", "backward", "all_gather", 60, 4),
    }


def test_parts_move_as_many_bytes_as_whole_tensors() -> None:
    sizes = {"input_bytes": [4096], "output_bytes": [8192]}
    whole, parts = (ledger_of(region_calls(TP, between=b, **sizes)) for b in ("whole", "sequence"))
    assert whole.bytes == parts.bytes


def test_data_need_no_gradient_and_recomputation_repeats_forward_alone() -> None:
    assert region_calls(TP, between="whole", input_bytes=[100], output_bytes=[], input_gradient=False) == ()
    again = region_calls(
        TP, between="sequence", input_bytes=[100], output_bytes=[60], recomputed_inputs=True, recomputed_outputs=True
    )
    counts = Counter((phase, kind) for _, phase, kind, _, _ in again)
    assert counts == {
        ("forward", "all_gather"): 1,
        ("forward", "reduce_scatter"): 1,
        ("backward", "all_gather"): 2,
        ("backward", "reduce_scatter"): 2,
    }


def test_one_rank_sends_nothing() -> None:
    alone = Group(axis="tp", ranks=1)
    assert region_calls(alone, between="sequence", input_bytes=[1], output_bytes=[1], inside_bytes=[1]) == ()
    assert vocabulary_calls(alone, embedding_bytes=1, head_bytes=1, loss_rows=1) == ()
    assert stream_calls(alone, stream_bytes=1) == ()
    assert list(crossing_calls(alone, {Crossing(how=how, whole_bytes=1): 3 for how in SENDS})) == []


def test_the_loss_sends_numbers_for_each_row_whatever_the_vocabulary() -> None:
    payloads = [call[3] for call in vocabulary_calls(TP, loss_rows=10, loss_itemsize=8)]
    assert payloads == [80, 160]
    assert [c[3] for c in vocabulary_calls(TP, loss_rows=10, loss_itemsize=8, label_smoothing=True)] == [80, 240]
    assert gathered_logits_bytes(rows=10, vocabulary=257, ranks=4, itemsize=8) == 10 * 4 * 65 * 8


def test_a_tally_starts_anew_when_it_is_taken() -> None:
    tally, crossing = Tally(), Crossing(how="gather", whole_bytes=8)
    tally.note(crossing)
    tally.note(crossing)
    assert tally.take() == {crossing: 2}
    assert tally.take() == {}
