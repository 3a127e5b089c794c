"""A cut passes through a view if and only if the parts of the view are views of the parts."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.layout.cuts import Cut
from shoal.layout.tensor.segments import refined, regrouped


@st.composite
def views(draw: st.DrawFn) -> tuple[Cut, tuple[int, ...], tuple[int, ...], int]:
    """A cut tensor and another shape of as many elements, by merging and splitting factors."""
    ranks = draw(st.integers(2, 3))
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 2 * ranks, 3 * ranks]), min_size=2, max_size=5))

    def grouped() -> tuple[int, ...]:
        marks = sorted(draw(st.sets(st.integers(1, len(factors) - 1))))
        ends = [0, *marks, len(factors)]
        return tuple(math.prod(factors[a:b]) for a, b in pairwise(ends))

    old, new = grouped(), grouped()
    possible = [dim for dim, size in enumerate(old) if size % ranks == 0]
    if not possible:
        old, new, possible = (ranks, *old), (ranks, *new), [0]
    dim = draw(st.sampled_from(possible))
    size, pieces = old[dim] // ranks, 1
    for number in (2, 3):
        if size % number == 0 and draw(st.booleans()):
            pieces = number
    return Cut(dim, (old[dim] // pieces,) * pieces), old, new, ranks


@given(views())
def test_parts_of_a_view_are_views_of_parts(case: tuple[Cut, tuple[int, ...], tuple[int, ...], int]) -> None:
    cut, old, new, ranks = case
    found = regrouped(cut, old, new)
    if found is None or math.gcd(*found.segments) % ranks:
        return
    whole = torch.arange(math.prod(old)).view(old)
    for index in range(ranks):
        expected = found.part(whole.view(new), ranks, index)
        assert torch.equal(cut.part(whole, ranks, index).reshape(expected.shape), expected)


@given(views())
def test_a_view_and_its_inverse_give_the_cut_back(case: tuple[Cut, tuple[int, ...], tuple[int, ...], int]) -> None:
    cut, old, new, ranks = case
    found = regrouped(cut, old, new)
    if found is None or math.gcd(*found.segments) % ranks:
        return
    back = regrouped(found, new, old)
    assert back is not None
    whole = torch.arange(math.prod(old)).view(old)
    assert torch.equal(back.part(whole, ranks, 0).flatten(), cut.part(whole, ranks, 0).flatten())


def test_three_in_front_of_heads_leave_the_heads_cut() -> None:
    assert regrouped(Cut(2, (32, 32, 32)), (2, 16, 96), (2, 16, 3, 4, 8)) == Cut(3, (4,))
    assert regrouped(Cut(2, (96,)), (2, 16, 96), (2, 16, 4, 3, 8)) == Cut(2, (4,))


def test_samples_merged_with_heads_are_one_stretch_for_each_sample() -> None:
    assert regrouped(Cut(1, (4,)), (2, 4, 16, 8), (8, 16, 8)) == Cut(0, (4, 4))
    assert regrouped(Cut(0, (4, 4)), (8, 16, 8), (2, 4, 16, 8)) == Cut(1, (4,))


def test_a_cut_that_would_be_torn_is_none() -> None:
    assert regrouped(Cut(1, (6,)), (4, 6), (3, 8)) is None
    assert regrouped(Cut(1, (3, 3)), (4, 6), (3, 8)) is None
    assert regrouped(Cut(0, (2,)), (2, 0), (0, 2)) is None


def test_borders_are_added_where_they_are_missing() -> None:
    assert refined((64,), {0, 32, 48}) == (32, 16, 16)
    assert refined((32, 32), {32}) == (32, 32)
