"""Natural compression: the two powers of two around an element, chosen so that the mean is right; and that one file
made it a term, an estimate and a row of the tables."""

from __future__ import annotations

import pytest
import torch

from comm.test_compress import DTYPES, draw, normal
from shoal.calibration.codecs import TERMS
from shoal.cluster import cluster
from shoal.planning.candidates import of_strategies
from shoal.planning.price import price_candidates
from shoal.shapes.presets import preset
from shoal.strategy import natural, parse, require_legal, techniques


def coded(x: torch.Tensor, step: int = 0) -> torch.Tensor:
    return natural().decode(natural().encode(x, draw(step)), len(x), x.dtype, draw(step))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_becomes_a_power_of_two_next_to_it(dtype: torch.dtype) -> None:
    x = normal(4097, dtype=dtype) ** 5
    found = coded(x)
    assert (torch.frexp(found).mantissa.abs() == 0.5).all()
    assert (found * x > 0).all()
    low = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)
    assert ((found.abs() == low) | (found.abs() == 2 * low)).all()
    assert (found.abs() == low).any()
    assert (found.abs() == 2 * low).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_and_zero_stay_as_they_are(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.5, -(2.0**-100), 2.0**100, torch.finfo(dtype).smallest_normal], dtype=dtype
    )
    assert torch.equal(coded(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_finite_stays_so_and_what_is_not_is_seen(dtype: torch.dtype) -> None:
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = torch.tensor([largest, -largest, least * 0.75, least * 0.25], dtype=dtype).repeat(500)
    for step in range(5):
        found = coded(x, step)
        assert torch.isfinite(found).all()
        assert set(found[2::4].tolist()) == {0.0, least}
    assert not torch.isfinite(coded(torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype))).any()


def test_the_variance_is_at_most_an_eighth_of_the_square() -> None:
    # (2 - t)(t - 1) over t squared is largest at 4/3 of a power: an eighth.
    for value in (1.0, 1.1, 4 / 3, 1.5, 1.9):
        x = torch.full((100_000,), value, dtype=torch.float64)
        assert (coded(x) - x).square().mean() <= value**2 / 8 * 1.02
    worst = torch.full((100_000,), 4 / 3, dtype=torch.float64)
    assert (coded(worst) - worst).square().mean() >= (4 / 3) ** 2 / 8 * 0.98


def test_one_file_made_it_known_everywhere() -> None:
    strategy = parse("dp(2, compress=natural()) * dp(8)")
    require_legal(strategy)
    assert natural() in TERMS
    assert [row.detail for row in techniques("compress") if row.name == "natural"] == ["n s/4 + n/8; error: unbiased"]
    rows = of_strategies([parse("dp(2) * dp(8)"), strategy], global_batch=64)
    place = cluster("dgx-a100", devices=16)
    dense_s, natural_s = price_candidates(rows, shape=preset("gpt2:medium"), cluster=place).split_s["data"]
    assert natural_s != dense_s
