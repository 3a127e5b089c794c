"""Where compressed steps overtake dense ones, in cases small enough to work out by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.network import LinkTimes
from shoal.estimate.crossover import Codec, Computing, Ends, ReducedBucket, Setting, collective_s, crossing, crossings
from shoal.strategy.terms.compress import fp16, gtopk, int8, powersgd, sign, ternary, threshold, topk

NO_ENDS = Ends(times=LinkTimes(0.0, 1e-15, 0.0), framed=1.0)
SHAPE = (1024, 1024)
DENSE_BYTES, INT8_BYTES = 4 * 2**20, 2**20 + 4 * 2**12


def setting(*ready_s: float, ends: Ends = NO_ENDS, step_s: float = 1.0) -> Setting:
    buckets = tuple(ReducedBucket(shapes=(SHAPE,), ready_s=each) for each in ready_s)
    return Setting(computing=Computing(step_s=step_s, buckets=buckets), ends=ends)


def test_one_bucket_at_the_end_of_backward_crosses_where_saved_wire_pays_for_the_codec() -> None:
    codec = Codec(tensor_s=1e-3, element_s=1e-8)
    codec_s = 1e-3 + 1e-8 * 2**20
    expected = (DENSE_BYTES - INT8_BYTES) / codec_s
    assert setting(0.5).overtakes(int8(), codec) == pytest.approx(expected, rel=1e-3)


def test_what_hides_behind_backward_moves_the_crossing_down() -> None:
    codec = Codec(tensor_s=0.0, element_s=1e-8)
    late, early = setting(0.5, 0.5), setting(0.4, 0.5)
    assert early.overtakes(int8(), codec) < late.overtakes(int8(), codec)
    # By hand: both buckets cost the codec; of the first one's wire 0.1 s are behind backward, where they fit.
    slow = 2e7
    assert early.dense_s(slow) == pytest.approx(1.0 + 2 * DENSE_BYTES / slow - 0.1, rel=1e-6)
    fast = 1e9
    assert early.dense_s(fast) == pytest.approx(1.0 + DENSE_BYTES / fast, rel=1e-6)


def test_moving_bytes_behind_backward_takes_computing_time_from_it() -> None:
    ends = Ends(times=LinkTimes(0.0, 1e-15, 0.0), background_byte_s=1e-9, framed=1.0)
    undisturbed, disturbed = setting(0.4, 0.5).dense_s(1e9), setting(0.4, 0.5, ends=ends).dense_s(1e9)
    # The wire is full for 4.2 ms, in which all of a core goes to it but for what always is left to computing.
    assert disturbed - undisturbed == pytest.approx(0.95 * DENSE_BYTES * 1e-9, rel=1e-6)
    ends = Ends(times=LinkTimes(0.0, 1e-15, 0.0), background_byte_s=1e-10, framed=1.0)
    assert setting(0.4, 0.5, ends=ends).dense_s(1e9) - undisturbed == pytest.approx(DENSE_BYTES * 1e-10, rel=1e-6)


def test_waking_up_takes_its_share_of_the_core_however_slow_the_wire() -> None:
    ends = Ends(times=LinkTimes(0.0, 1e-15, 0.0), background_share=0.2, framed=1.0)
    slow = 2e7
    # All of the 0.1 s behind backward are disturbed, and become 0.125 s in which the wire moves, too.
    assert setting(0.4, 0.5, ends=ends).dense_s(slow) == pytest.approx(1.0 + 2 * DENSE_BYTES / slow - 0.1, rel=1e-6)
    fast = 1e9
    more_s = setting(0.4, 0.5, ends=ends).dense_s(fast) - setting(0.4, 0.5).dense_s(fast)
    assert more_s == pytest.approx(0.2 * DENSE_BYTES / fast, rel=1e-6)


def test_a_target_that_needs_more_compressed_steps_moves_the_crossing_down() -> None:
    codec = Codec(tensor_s=0.0, element_s=1e-8)
    here = setting(0.5)
    at = here.overtakes(int8(), codec, slowdown=1.1)
    assert at < here.overtakes(int8(), codec)
    assert here.dense_s(at) == pytest.approx(1.1 * here.compressed_s(int8(), codec, at), rel=1e-3)
    by_name = crossings(here, {int8(): codec, sign(): codec}, slowdowns={"int8": 1.1})
    assert by_name[int8()] == at
    assert by_name[sign()] == here.overtakes(sign(), codec)


@given(
    ready=st.lists(st.floats(0.01, 0.2), min_size=1, max_size=4),
    element_s=st.floats(1e-9, 1e-7),
    background=st.floats(0, 3e-9),
    term=st.sampled_from([fp16(), int8(), ternary(), sign(), topk(0.01), gtopk(0.01), powersgd(4)]),
)
def test_below_the_crossing_compression_wins_and_above_it_loses(ready, element_s, background, term) -> None:
    ends = Ends(times=LinkTimes(5e-5, 2e-10, 0.0), background_byte_s=background)
    so_far = [sum(ready[: place + 1]) for place in range(len(ready))]
    here, codec = setting(*so_far, ends=ends), Codec(tensor_s=1e-4, element_s=element_s)
    at = here.overtakes(term, codec)
    assert 0 < at < inf
    assert here.compressed_s(term, codec, at / 1.1) < here.dense_s(at / 1.1)
    assert here.compressed_s(term, codec, at * 1.1) >= here.dense_s(at * 1.1)


@given(ready=st.lists(st.floats(0.001, 0.2), min_size=1, max_size=4), slower=st.floats(1.01, 10))
def test_a_slower_link_is_never_faster(ready, slower) -> None:
    ends = Ends(times=LinkTimes(5e-5, 2e-10, 0.0), background_byte_s=1e-9)
    here, codec = setting(*sorted(ready), ends=ends), Codec(tensor_s=1e-4, element_s=1e-8)
    for bytes_per_s in (1e6, 1e8, 1e10):
        assert here.dense_s(bytes_per_s / slower) >= here.computing.step_s
        assert here.compressed_s(sign(), codec, bytes_per_s / slower) >= here.compressed_s(sign(), codec, bytes_per_s)


def test_no_crossing_is_0_or_inf() -> None:
    assert crossing(lambda b: 1 / b, lambda b: 1 / b + 1) == 0.0
    assert crossing(lambda b: 1 / b + 1, lambda b: 1 / b) == inf
    assert crossing(lambda b: 1e8 / b, lambda b: 1.0) == pytest.approx(1e8, rel=1e-3)


def test_small_tensors_travel_as_they_are() -> None:
    vectors = Computing(step_s=1.0, buckets=(ReducedBucket(shapes=((256,), (16, 16)), ready_s=0.5),))
    here = Setting(computing=vectors, ends=NO_ENDS)
    assert here.compressed_s(int8(), Codec(tensor_s=1.0, element_s=1.0), 1e6) == pytest.approx(here.dense_s(1e6))


def test_what_data_decide_is_refused() -> None:
    with pytest.raises(ValueError, match="decided by the data"):
        setting(0.5).overtakes(threshold(0.001), Codec(tensor_s=0.0, element_s=1e-9))


def test_collectives_of_two_ranks_send_what_the_ledger_counts() -> None:
    link = LinkTimes(1e-3, 1e-6, 0.0)
    assert collective_s("all_gather", 2000, 2, link) == pytest.approx(1e-3 + 1000e-6)
    assert collective_s("recv", 2000, 2, link) == pytest.approx(1e-3 + 2000e-6)
    assert collective_s("all_reduce", 1 << 20, 2, link) == pytest.approx(2e-3 + (1 << 20) * 1e-6)
    assert collective_s("all_reduce", 1 << 20, 1, link) == 0.0
