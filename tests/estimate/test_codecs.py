"""Passes and seconds of codecs, as plans ask for them."""

from __future__ import annotations

from math import prod

import pytest

from estimate.machines import machine
from shoal.calibration.job_model import job_model
from shoal.estimate.codecs import codec_s
from shoal.estimate.steps.price import price_step
from shoal.job import load_job
from shoal.strategy import parse
from shoal.strategy.terms.compress import int8, none, powersgd


def test_passes_become_seconds_by_the_memory_bandwidth_and_grow_with_the_payloads() -> None:
    own, each = int8.passes
    two, nine = (codec_s(int8(), 1e6, ranks=ranks, stream_bytes_per_s=4e9) for ranks in (2, 9))
    assert two == pytest.approx((own + 2 * each) * 1e-3)
    assert nine - two == pytest.approx(7 * each * 1e-3)


def test_a_method_with_other_numbers_takes_the_measured_ones() -> None:
    other = codec_s(powersgd(8), 1e6, ranks=2, stream_bytes_per_s=4e9)
    assert other == codec_s(powersgd(4), 1e6, ranks=2, stream_bytes_per_s=4e9)
    with pytest.raises(ValueError, match="no passes are known for none"):
        codec_s(none(), 1e6, ranks=2, stream_bytes_per_s=4e9)


def test_a_calibrated_machine_has_its_own_seconds() -> None:
    model, _ = job_model(load_job("language:tiny"))
    here = machine()
    measured = price_step(model, parse("dp(2, compress=ternary())"), here).step_split["codec"]
    tensor_s, element_s = here.codecs["ternary()"]
    # Matrices: vectors are too small to pay.
    large = [prod(shape) for shape in (each.shape for each in model.shapes.parameters) if len(shape) > 1]
    assert measured == pytest.approx(tensor_s * len(large) + element_s * sum(large))
    passes = price_step(model, parse("dp(2, compress=int8())"), here).step_split["codec"]
    assert passes == codec_s(int8(), model.parameter_bytes / 4, ranks=2, stream_bytes_per_s=here.memory_bytes_per_s)
