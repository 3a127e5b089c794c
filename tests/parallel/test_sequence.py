"""The cut of a sequence among ranks: every position once, in an order that both halves of the code can rely on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.context.attention import is_balanced
from shoal.parallel.context.sequence import chunks_of, positions


def test_a_balanced_rank_holds_an_early_chunk_and_the_late_one_that_mirrors_it() -> None:
    held = [chunks_of(24, 3, index, balanced=True) for index in range(3)]
    assert held == [
        (slice(0, 4), slice(20, 24)),
        (slice(4, 8), slice(16, 20)),
        (slice(8, 12), slice(12, 16)),
    ]


def test_an_unbalanced_rank_holds_one_contiguous_chunk() -> None:
    assert [chunks_of(6, 3, index, balanced=False) for index in range(3)] == [
        (slice(0, 2),),
        (slice(2, 4),),
        (slice(4, 6),),
    ]


@given(ranks=st.integers(1, 9), size=st.integers(1, 5), balanced=st.booleans())
def test_every_position_is_held_once_and_in_ascending_order_within_a_rank(
    ranks: int, size: int, balanced: bool
) -> None:
    length = size * ranks * (2 if balanced else 1)
    held = [positions(length, ranks, index, balanced=balanced) for index in range(ranks)]
    assert torch.cat(held).sort().values.tolist() == list(range(length))
    for each in held:
        assert each.dtype == torch.int64
        assert each.tolist() == sorted(each.tolist())
        assert len(each) == length // ranks


@given(ranks=st.integers(1, 9), size=st.integers(1, 5))
def test_balanced_ranks_see_equally_much_of_the_past(ranks: int, size: int) -> None:
    length = 2 * size * ranks
    pasts = {int((positions(length, ranks, index, balanced=True) + 1).sum()) for index in range(ranks)}
    assert len(pasts) == 1


@given(length=st.integers(-3, 10**30), ranks=st.integers(1, 9), balanced=st.booleans())
def test_a_length_that_does_not_divide_is_refused_with_the_multiple_it_needs(
    length: int, ranks: int, balanced: bool
) -> None:
    parts = 2 * ranks if balanced else ranks
    if length > 0 and length % parts == 0:
        chunks = chunks_of(length, ranks, 0, balanced=balanced)
        assert sum(chunk.stop - chunk.start for chunk in chunks) == length // ranks
        return
    with pytest.raises(ValueError, match=f"{length} positions .* multiple of {parts}"):
        chunks_of(length, ranks, 0, balanced=balanced)


@pytest.mark.parametrize(("ranks", "index"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(ranks: int, index: int) -> None:
    with pytest.raises(ValueError, match=f"no rank {index} among {ranks}"):
        chunks_of(12, ranks, index, balanced=False)


def test_only_a_causal_ring_is_cut_in_two_chunks_a_rank() -> None:
    assert is_balanced("ring", causal=True)
    assert not is_balanced("ring", causal=False)
    assert not is_balanced("ulysses", causal=True)
