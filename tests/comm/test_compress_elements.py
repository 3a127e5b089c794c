"""Which elements are chosen: exactly k of the largest, those above a threshold, or places that all draw alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from comm.test_compress import DTYPES, draw, normal
from shoal.comm.compress.largest import largest
from shoal.comm.compress.payload import sparse_parts
from shoal.strategy.terms import compress as terms
from shoal.technique.compress.mstopk import bisected

FEW_VALUES = some.lists(some.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, -2.5, 1e-3]), min_size=1, max_size=200)


def assert_largest(x: torch.Tensor, places: torch.Tensor, count: int) -> None:
    assert len(places) == len(places.unique()) == count
    rest = torch.ones(len(x), dtype=torch.bool)
    rest[places] = False
    if rest.any():
        assert x[places].abs().min() >= x[rest].abs().max()


@settings(max_examples=200, deadline=None)
@given(FEW_VALUES, some.integers(1, 200), some.sampled_from(DTYPES))
def test_mstopk_finds_exactly_k_of_the_largest_among_ties(values: list[float], count: int, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    count = min(count, len(x))
    assert_largest(x, bisected(x, count), count)
    assert_largest(x, largest(x, count), count)


def large(kind: str, dtype: torch.dtype) -> torch.Tensor:
    n = 200_003
    x = normal(n, dtype=dtype)
    if kind == "constant":
        return torch.full((n,), 0.1, dtype=dtype)
    if kind == "zeros":
        return torch.zeros(n, dtype=dtype)
    if kind == "one huge":
        x[5] = 1e37
    if kind == "few values":
        return x.round()
    if kind == "sparse":
        x[torch.arange(n) % 1000 != 0] = 0
    if kind == "heavy tails":
        return x**7
    if kind == "the sample sees only small ones":
        x[:: (n // 8192) | 1] = 0
    if kind == "the sample sees only large ones":
        x[:: (n // 8192) | 1] *= 100
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    [
        "normal",
        "constant",
        "zeros",
        "one huge",
        "few values",
        "sparse",
        "heavy tails",
        "the sample sees only small ones",
        "the sample sees only large ones",
    ],
)
def test_exactly_k_of_the_largest_in_large_tensors(kind: str, dtype: torch.dtype) -> None:
    x = large(kind, dtype)
    for count in (1, 20, 2_000, 30_000, 150_000, len(x)):
        assert_largest(x, bisected(x, count), count)
        assert_largest(x, largest(x, count), count)


def test_threshold_sends_all_that_reach_it_and_no_other() -> None:
    x = torch.tensor([0.5, -0.5, 0.49, -3.0, 0.0, 0.500001])
    payload = terms.threshold(0.5).encode(x, draw())
    values, places = sparse_parts(payload, x.dtype)
    assert places.tolist() == [0, 1, 3, 5]
    assert values.tolist() == x[[0, 1, 3, 5]].tolist()
    assert len(terms.threshold(4.0).encode(x, draw())) == 0
    # Smaller than any number of this type: all but zeros.
    assert len(terms.threshold(1e-300).encode(x, draw())) == 5 * 8


def test_randomk_draws_each_place_equally_often_and_none_twice() -> None:
    codec, n, rounds = terms.randomk(0.3), 101, 4000
    counts = torch.zeros(n)
    for step in range(rounds):
        places = codec.places(n, draw(step, rank=step % 5))
        assert len(places.unique()) == len(places) == 30
        counts[places] += 1
    expected = rounds * 30 / n
    assert (counts - expected).abs().max() < 5 * (expected * (1 - 30 / n)) ** 0.5
    assert torch.equal(codec.places(n, draw(1, rank=0)), codec.places(n, draw(1, rank=3)))
    assert not torch.equal(codec.places(n, draw(1)), codec.places(n, draw(2)))
