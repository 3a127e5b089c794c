"""Which products a rank of the ring computes: what may be seen, all of it and nothing else, and evenly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.context.ring_parts import RingPart, RingPlan
from shoal.parallel.context.sequence import positions


def visible(plan: RingPlan, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, list[int]]:
    """Which columns (in the order of the sequence) each row of the plan's rank sees; scores computed per visitor."""
    whole = plan.ranks * plan.length
    found = torch.zeros(plan.length, whole, dtype=torch.bool)
    sizes = []
    for source in range(plan.ranks):
        work = plan.work(source, plan.effective(mask))
        if work is None:
            sizes.append(0)
            continue
        rows = torch.arange(plan.length)[work.part.rows]
        within = torch.arange(plan.length)[work.part.columns]
        sizes.append(len(rows) * len(within))
        allowed = torch.ones(len(rows), len(within), dtype=torch.bool)
        if work.part.causal:
            allowed = allowed.tril()
        if work.mask is not None:
            seen = work.mask if work.mask.dtype == torch.bool else work.mask > float("-inf")
            allowed = allowed & seen[0, 0]
        columns = positions(whole, plan.ranks, source, balanced=plan.balanced)[within]
        found[rows[:, None], columns] |= allowed
    return found, sizes


def plans(ranks: int, length: int, *, causal: bool, balanced: bool) -> list[RingPlan]:
    return [RingPlan(ranks=ranks, index=each, length=length, causal=causal, balanced=balanced) for each in range(ranks)]


def held(plan: RingPlan) -> torch.Tensor:
    return positions(plan.ranks * plan.length, plan.ranks, plan.index, balanced=plan.balanced)


@given(ranks=st.integers(2, 7), half=st.integers(1, 3), causal=st.booleans(), balanced=st.booleans())
def test_the_parts_cover_exactly_what_may_be_seen(ranks: int, half: int, causal: bool, balanced: bool) -> None:
    for plan in plans(ranks, 2 * half, causal=causal, balanced=balanced):
        expected = torch.ones(plan.length, ranks * plan.length, dtype=torch.bool)
        if causal:
            expected = torch.arange(ranks * plan.length) <= held(plan)[:, None]
        assert torch.equal(visible(plan)[0], expected)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_balanced_causal_ring_computes_the_same_with_every_visitor(ranks: int) -> None:
    for plan in plans(ranks, 6, causal=True, balanced=True):
        _, sizes = visible(plan)
        others = sizes[: plan.index] + sizes[plan.index + 1 :]
        assert others == [6 * 6 // 2] * (ranks - 1)
        assert sizes[plan.index] == 6 * 6


def test_without_balance_the_first_rank_idles_and_the_last_computes_everything() -> None:
    sizes = [sum(visible(plan)[1]) for plan in plans(4, 4, causal=True, balanced=False)]
    assert sizes == [16, 32, 48, 64]


@pytest.mark.parametrize(
    "hidden", [False, float("-inf"), torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min]
)
def test_a_causal_mask_given_as_a_tensor_saves_what_is_causal_does(hidden: float) -> None:
    for plan in plans(3, 4, causal=False, balanced=True):
        lower = torch.arange(12) <= held(plan)[:, None]
        mask = lower if hidden is False else torch.zeros(4, 12).masked_fill(~lower, hidden)
        found, sizes = visible(plan, mask[None, None])
        assert torch.equal(found, lower)
        assert sizes == visible(RingPlan(ranks=3, index=plan.index, length=4, causal=True, balanced=True))[1]


@given(data=st.data(), causal=st.booleans(), balanced=st.booleans(), rows=st.sampled_from([1, 4]))
def test_any_mask_is_kept_where_it_lets_something_through(
    data: st.DataObject, causal: bool, balanced: bool, rows: int
) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=rows * 12, max_size=rows * 12))
    mask = torch.tensor(bits).view(rows, 12)
    for plan in plans(3, 4, causal=causal, balanced=balanced):
        expected = mask.expand(4, 12)
        if causal:
            expected = expected & (torch.arange(12) <= held(plan)[:, None])
        assert torch.equal(visible(plan, mask[None, None])[0], expected)


def test_a_mask_that_hides_everything_leaves_nothing_to_compute() -> None:
    plan = RingPlan(ranks=2, index=0, length=4, causal=False, balanced=False)
    assert plan.work(1, torch.zeros(1, 1, 1, 8, dtype=torch.bool)) is None
    assert plan.work(1, torch.full((1, 1, 4, 8), float("-inf"))) is None


def test_a_row_that_sees_only_the_lowest_number_keeps_it() -> None:
    lowest = torch.finfo(torch.float64).min
    mask = torch.tensor([[lowest, lowest], [0.0, lowest]], dtype=torch.float64)[None, None]
    plan = RingPlan(ranks=2, index=0, length=2, causal=False, balanced=False)
    kept = plan.effective(mask.repeat(1, 1, 1, 2))
    assert kept is not None
    assert kept[0, 0, 0].tolist() == [lowest] * 4
    assert kept[0, 0, 1].tolist() == [0.0, float("-inf")] * 2


def test_parts_are_values() -> None:
    part = RingPart(rows=slice(0, 2), columns=slice(0, 2))
    assert part == RingPart(rows=slice(0, 2), columns=slice(0, 2), causal=False)
