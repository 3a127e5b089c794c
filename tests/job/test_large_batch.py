"""Scaled learning rates and growing batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.job import Job, JobError, Order, load_job
from shoal.job.large_batch import parse_growth, rate_factor
from shoal.parallel.noise import measured
from shoal.runtime.options import JobOptions
from shoal.runtime.setup import job_from
from shoal.training.noise_scale import ENOUGH, NoiseScale


@pytest.fixture(scope="module")
def job() -> Job:
    return load_job("language:tiny")


def test_a_scaled_rate_is_reached_from_the_base_rate() -> None:
    def rates(rule: str, warmup: int) -> list[float]:
        return [rate_factor(rule, batch=64, base=16, warmup=warmup, step=step) for step in range(5)]  # type: ignore[arg-type]

    assert rates("linear", 0) == [4.0] * 5
    assert rates("linear", 3) == [2.0, 3.0, 4.0, 4.0, 4.0]
    assert rates("sqrt", 2) == [1.5, 2.0, 2.0, 2.0, 2.0]
    assert rates("none", 3) == [1.0] * 5
    assert rate_factor("linear", batch=8, base=16, warmup=0, step=0) == 0.5


def test_the_command_scales_from_the_jobs_own_batch(job: Job) -> None:
    larger = job_from(JobOptions(job="language:tiny", global_batch=96, scale_rule="linear", warmup=0))
    assert larger.lr_factor(100) == 4 * job.schedule(100)
    gradual = job_from(JobOptions(job="language:tiny", global_batch=96, scale_rule="sqrt", steps=200))
    assert gradual.warmup == 10
    assert gradual.lr_factor(0) < gradual.lr_factor(9) == 2 * gradual.schedule(9)
    same = job_from(JobOptions(job="language:tiny", global_batch=96, scale_rule="linear", base_batch=96))
    assert [same.lr_factor(step) for step in (0, 50)] == [job.schedule(step) for step in (0, 50)]
    assert job_from(JobOptions(job="language:tiny", growth="48:48")).growth == ((48, 48),)


def test_growth_is_a_function_of_the_counter() -> None:
    order = Order(3, 1000, 10, growth=((25, 20), (60, 40)))
    starts = [0]
    while starts[-1] < 200:
        starts.append(order.next(starts[-1]))
    assert starts == [0, 10, 20, 30, 50, 70, 110, 150, 190, 230]
    plain = Order(3, 1000, 230)
    assert np.array_equal(np.concatenate([order.indices(start) for start in starts[:-1]]), plain.indices(0))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scale_rule": "cubic"}, "must be 'none', 'linear' or 'sqrt'"),
        ({"base_batch": 0}, "base_batch is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"growth": ((5, 10), (5, 20))}, "with ascending numbers of samples"),
        ({"growth": ((5,),)}, "must be ((samples, batch), ...)"),
    ],
)
def test_what_cannot_be_is_refused(job: Job, changes: dict[str, object], why: str) -> None:
    with pytest.raises(JobError) as refused:
        replace(job, **changes)  # type: ignore[arg-type]
    assert why in str(refused.value)


def test_growth_that_cannot_be_read_is_refused() -> None:
    assert parse_growth("2000:48,6000 : 96") == ((2000, 48), (6000, 96))
    for text in ("48", "a:b", "10:20;30:40", ""):
        with pytest.raises(JobError, match="growth takes"):
            parse_growth(text)


def test_noise_and_signal_are_unbiased_for_uneven_small_batches() -> None:
    generator, dimensions, sizes = np.random.default_rng(1), 40, (1, 2, 5, 8)
    true = np.full(dimensions, 0.15)
    rows = []
    for _ in range(4000):
        sums = [true * c + np.sqrt(c) * 0.7 * generator.standard_normal(dimensions) for c in sizes]
        spread = sum(float(g @ g) / c for g, c in zip(sums, sizes, strict=True))
        total = sum(sizes)
        found = measured(spread, len(sizes), total, float(np.linalg.norm(sum(sums) / total)))
        assert found is not None
        rows.append((found.noise, found.signal))
    noise, signal = np.mean(rows, axis=0)
    assert noise == pytest.approx(dimensions * 0.49, rel=0.02)
    assert signal == pytest.approx(float(true @ true), rel=0.03)
    assert measured(1.0, 1, 4, 1.0) is None


def test_the_noise_scale_is_a_ratio_of_averages_and_survives_a_restart() -> None:
    scale = NoiseScale()
    for step in range(40):
        found = measured(spread=30.0 + step % 2, parts=4, count=16, norm=1.2)
        scale.add(found, samples_per_count=0.5)
        assert (scale.critical_batch is None) == (step + 1 < ENOUGH)
    again = NoiseScale(scale.state)
    assert again.critical_batch == scale.critical_batch == pytest.approx(scale.noise / scale.signal)
    scale.add(None, samples_per_count=1.0)
    assert scale.state == again.state
