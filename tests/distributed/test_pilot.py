"""Pilot steps and the model of a step over a slow link, on real ranks."""

from __future__ import annotations

from math import prod

import pytest


@pytest.mark.timeout(90)
def test_a_pilot_tells_when_buckets_are_ready_and_leaves_nothing_behind(ranks) -> None:
    first, second = ranks("distributed.pilot_targets:pilots", ranks=2)
    assert first == second
    computing, ends = first["computing"], first["ends"]
    ready = [bucket["ready_s"] for bucket in computing["buckets"]]
    assert min(ready) > 0
    assert ready == sorted(ready)
    assert sum(prod(shape) for bucket in computing["buckets"] for shape in bucket["shapes"]) == first["parameters"]
    assert ends["times"]["latency_s"] > 0
    assert ends["times"]["byte_s"] > 0
    assert ends["background_share"] + ends["background_byte_s"] > 0
    assert first["left"] == 0


@pytest.mark.timeout(90)
def test_a_step_over_a_slow_link_takes_the_predicted_wire_time_and_little_more(ranks) -> None:
    found = ranks("distributed.pilot_targets:steps_on_a_slow_link", ranks=2)[0]
    for name, wire in (("dp(2)", "dense_wire"), ("dp(2, compress=int8())", "int8_wire")):
        # Computing comes on top, which is a fraction of it; other programs only add to that.
        assert 0.9 * found[wire] < found[name] < 2.5 * found[wire] + 0.2
    assert found["dp(2, compress=int8())"] < found["dp(2)"]
