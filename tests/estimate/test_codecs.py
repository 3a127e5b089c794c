"""Passes and seconds of codecs, as plans ask for them."""

from __future__ import annotations

import pytest

from shoal.estimate.codecs import CODEC_PASSES, calibrated_codecs, codec_s
from shoal.strategy.compress import int8, none, powersgd, topk


def test_passes_become_seconds_by_the_memory_bandwidth_and_grow_with_the_payloads() -> None:
    own, each = CODEC_PASSES["int8()"]
    two, nine = (codec_s(int8(), 1e6, ranks=ranks, stream_bytes_per_s=4e9) for ranks in (2, 9))
    assert two == pytest.approx((own + 2 * each) * 1e-3)
    assert nine - two == pytest.approx(7 * each * 1e-3)


def test_a_calibrated_machine_has_its_own_seconds() -> None:
    times = {"int8()": (1e-4, 5e-9)}
    two, nine = (
        codec_s(int8(), 1e6, ranks=ranks, stream_bytes_per_s=4e9, calibrated=times) for ranks in (2, 9)
    )  # fmt: skip
    assert two == pytest.approx(5e-3)
    own, each = CODEC_PASSES["int8()"]
    assert nine / two == pytest.approx((own + 9 * each) / (own + 2 * each))
    unknown = codec_s(topk(0.01), 1e6, ranks=2, stream_bytes_per_s=4e9, calibrated=times)
    assert unknown == codec_s(topk(0.01), 1e6, ranks=2, stream_bytes_per_s=4e9)


def test_a_method_with_other_numbers_takes_the_measured_ones() -> None:
    other = codec_s(powersgd(8), 1e6, ranks=2, stream_bytes_per_s=4e9)
    assert other == codec_s(powersgd(4), 1e6, ranks=2, stream_bytes_per_s=4e9)
    with pytest.raises(ValueError, match="no passes are known for none"):
        codec_s(none(), 1e6, ranks=2, stream_bytes_per_s=4e9)


def test_the_calibration_file_may_hold_codecs(tmp_path) -> None:
    path = tmp_path / "calibration.toml"
    assert calibrated_codecs(path) is None
    path.write_text('[machine.codecs."int8()"]\ncall_s = 1e-4\nelement_s = 6e-9\n')
    assert calibrated_codecs(path) == {"int8()": (1e-4, 6e-9)}
    path.write_text("[links]\n")
    assert calibrated_codecs(path) is None


def test_the_plan_of_this_machine_is_priced_by_its_own_codecs(tmp_path, monkeypatch) -> None:
    from dataclasses import replace

    import numpy as np

    from shoal.cluster import cluster
    from shoal.plan.candidates import of_strategies
    from shoal.plan.price import price_candidates
    from shoal.strategy import parse
    from shoal.workload.presets import preset

    path = tmp_path / "calibration.toml"
    monkeypatch.setenv("SHOAL_CALIBRATION", str(path))
    rows = of_strategies([parse("dp(2, compress=int8()) * dp(4)")], global_batch=64)
    shape, there = preset("gpt2:small"), cluster("dgx-a100", devices=8)
    here = replace(there, name="this")

    def step_s(place) -> float:
        return float(np.asarray(price_candidates(rows, shape=shape, cluster=place, everything=True).step_s)[0])

    assert step_s(here) == step_s(there)
    path.write_text('[machine.codecs."int8()"]\ncall_s = 1e-4\nelement_s = 1e-6\n')
    assert step_s(here) > step_s(there) + 1e-6 * 1e8 / 4 * 0.9
