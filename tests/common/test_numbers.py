"""Parts of a range cover it, products are products, and a zero is found from the left."""

from __future__ import annotations

from itertools import pairwise
from math import exp, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.common.numbers import divisors, even_part, falls_to_zero, ordered_products


@given(st.integers(0, 1000), st.integers(1, 50))
def test_parts_of_a_range_cover_it_and_differ_by_one_at_most(total: int, parts: int) -> None:
    found = [even_part(total, parts, index) for index in range(parts)]
    assert found[0][0] == 0
    assert found[-1][1] == total
    assert all(one[1] == next_[0] for one, next_ in pairwise(found))
    sizes = [stop - start for start, stop in found]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 500), st.integers(1, 4))
def test_ordered_products_are_all_of_them_once(total: int, factors: int) -> None:
    found = list(ordered_products(total, factors))
    assert len(set(found)) == len(found)
    assert all(prod(each) == total and len(each) == factors for each in found)
    if factors == 2:
        assert len(found) == len(divisors(total)) == sum(total % each == 0 for each in range(1, total + 1))


@given(st.floats(-5, 5), st.floats(0.1, 10))
def test_a_zero_is_found_from_the_left(zero: float, steep: float) -> None:
    def value(at: float) -> float:
        return exp(-steep * at) - exp(-steep * zero)

    found = falls_to_zero(value, -6, 6, above=value(-6), below=value(6), close=1e-3)
    assert value(found) > 0
    assert found == pytest.approx(zero, abs=1e-3)
