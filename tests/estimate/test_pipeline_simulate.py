"""The clock: timeline bubbles equal the formulas exactly, and a schedule that cannot run is refused with a reason."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.estimate.pipeline.simulate import (
    ScheduleDeadlock,
    bubble_formula,
    bubble_formula_text,
    simulate_schedule,
    simulate_term,
)
from shoal.strategy.schedule import Action, actions, steady
from shoal.strategy.terms import pp
from strategy.test_schedule import pipelines

RATIOS = st.fractions(min_value=Fraction(1, 8), max_value=8, max_denominator=16)


@given(pipelines("gpipe", "1f1b", "interleaved"), RATIOS)
def test_the_played_bubble_is_the_formula_whatever_a_backward_costs(term: pp, ratio: Fraction) -> None:
    # In fractions nothing is rounded: messages take 0, not 0.0.
    timeline = simulate_term(term, forward_s=1, backward_s=ratio, transfer_s=0)  # type: ignore[arg-type]
    assert timeline.bubble == Fraction(term.n - 1, term.chunks * term.micro + term.n - 1)
    assert float(timeline.bubble) == bubble_formula(term)
    assert timeline.makespan_s == (term.chunks * term.micro + term.n - 1) * (1 + ratio)


@given(pipelines("zero-bubble"))
def test_zero_bubble_is_optimal_for_even_passes_and_one_chunk(term: pp) -> None:
    assume(term.chunks == 1)
    timeline = simulate_term(term)
    # The last rank starts late by n - 1; the last input gradient travels back, and one weight gradient follows.
    assert timeline.makespan_s == max(3 * term.micro + term.n - 1, 2 * term.micro + 2 * term.n - 1)
    assert timeline.bubble == pytest.approx(bubble_formula(term), abs=1e-12)


@given(pipelines("zero-bubble"))
def test_zero_bubble_is_never_slower_than_1f1b(term: pp) -> None:
    one_chunk = simulate_term(pp(term.n, "1f1b", micro=term.micro))
    assert simulate_term(term).makespan_s <= term.chunks * one_chunk.makespan_s


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_zero_bubble_with_chunks_is_not_slower_than_interleaving(ranks: int, chunks: int, rounds: int) -> None:
    split = simulate_term(pp(ranks, "zero-bubble", micro=ranks * rounds, chunks=chunks))
    whole = simulate_term(pp(ranks, "interleaved", micro=ranks * rounds, chunks=chunks))
    assert split.makespan_s <= whole.makespan_s
    assert max(split.in_flight) <= max(whole.in_flight)


@given(pipelines("pipedream"), RATIOS)
def test_pipedream_does_not_idle_while_it_is_full(term: pp, ratio: Fraction) -> None:
    timeline = simulate_term(term, forward_s=1, backward_s=ratio, transfer_s=0)  # type: ignore[arg-type]
    assert timeline.steady_bubble in (None, 0)
    if term.micro > term.n:
        assert timeline.steady_bubble == bubble_formula(term) == 0


def test_gpipe_idles_between_its_phases() -> None:
    timeline = simulate_term(pp(2, "gpipe", micro=2))
    assert [(box.action.kind, box.start_s, box.stop_s) for box in timeline.lanes[0]] == [
        ("F", 0, 1),
        ("F", 1, 2),
        ("BW", 5, 7),
        ("BW", 7, 9),
    ]
    assert timeline.idle_s == (3, 3)
    assert timeline.steady_bubble is None


@given(pipelines(), st.floats(0, 3), st.floats(0.1, 3), st.floats(0.1, 3))
def test_nothing_starts_before_what_it_needs_has_arrived(
    term: pp, transfer_s: float, forward_s: float, backward_s: float
) -> None:
    timeline = simulate_term(term, forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s)
    times = {
        (box.action.kind[0], box.action.stage, box.action.micro): (rank, box)
        for rank, lane in enumerate(timeline.lanes)
        for box in lane
    }
    last = term.n * term.chunks - 1
    for (kind, stage, micro), (rank, box) in times.items():
        needs = {"F": [("F", stage - 1)], "B": [("F", stage), ("B", stage + 1)], "W": [("B", stage)]}[kind]
        for need, where in needs:
            if 0 <= where <= last:
                source, before = times[need, where, micro]
                assert box.start_s >= before.stop_s + (transfer_s if source != rank else 0)
    for lane in timeline.lanes:
        assert all(a.stop_s <= b.start_s for a, b in pairwise(lane))


@given(pipelines(), st.data())
def test_idle_and_busy_time_make_up_the_makespan(term: pp, data: st.DataObject) -> None:
    stages = term.n * term.chunks
    costs = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    timeline = simulate_term(term, forward_s=costs, backward_s=[2 * cost for cost in costs])
    for lane, idle_s in zip(timeline.lanes, timeline.idle_s, strict=True):
        assert sum(box.stop_s - box.start_s for box in lane) + idle_s == timeline.makespan_s
    assert 0 <= timeline.bubble < 1


def test_the_slowest_stage_sets_the_pace() -> None:
    even = simulate_term(pp(4, micro=64))
    uneven = simulate_term(pp(4, micro=64), forward_s=[1, 1, 2, 1], backward_s=[2, 2, 4, 2])
    assert uneven.makespan_s == pytest.approx(2 * even.makespan_s, rel=0.1)
    assert uneven.idle_s[2] < min(uneven.idle_s[:2])


def test_messages_that_take_time_lengthen_the_way_through_the_pipeline() -> None:
    # One micro-batch: three hops there and three back.
    assert simulate_term(pp(4, micro=1), transfer_s=0.5).makespan_s == 12 + 6 * 0.5
    # In a V the turn at the last rank sends no message.
    assert simulate_term(pp(2, "zero-bubble", micro=1, chunks=2), transfer_s=0.5).makespan_s == 9 + 4 * 0.5


def test_weight_gradients_take_their_part_of_the_backward() -> None:
    timeline = simulate_term(pp(1, "zero-bubble", micro=1), backward_s=4, weight_s=1)
    assert [box.stop_s - box.start_s for box in timeline.lanes[0]] == [1, 3, 1]
    assert [box.stop_s - box.start_s for box in simulate_term(pp(1, "zero-bubble"), backward_s=4).lanes[0]] == [1, 2, 2]


def test_activations_are_kept_until_the_weight_gradients_are_done() -> None:
    order = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("W", 0, 0), Action("B", 0, 1)]
    assert simulate_schedule([order], ranks=1, chunks=1, schedule="zero-bubble").in_flight == (2,)
    whole = [Action("F", 0, 0), Action("BW", 0, 0), Action("F", 0, 1), Action("BW", 0, 1)]
    assert simulate_schedule([whole], ranks=1, chunks=1, schedule="1f1b").in_flight == (1,)


def test_a_run_that_is_cut_off_can_be_played() -> None:
    timeline = simulate_schedule(steady(pp(3, "pipedream"), 5), ranks=3, chunks=1, schedule="pipedream")
    assert timeline.micro == 5
    assert timeline.in_flight == (3, 2, 1)


def test_a_deadlock_says_who_waits_for_whom() -> None:
    first, second = actions(pp(2, micro=2))
    first = [first[0], first[2], first[1], first[3]]  # F0 B0 F1 B1: B0 needs rank 1, which has F0.
    assert simulate_schedule([first, second], ranks=2, chunks=1, schedule="1f1b").makespan_s > 0
    stuck = [second[1], second[0], *second[2:]]  # The last rank wants the gradient of a forward it has not computed.
    with pytest.raises(ScheduleDeadlock, match="deadlocks: rank 0 cannot start BW") as raised:
        simulate_schedule([first, stuck], ranks=2, chunks=1, schedule="1f1b")
    assert "rank 1 cannot start BW(stage 1, micro-batch 0): it waits for F(stage 1, micro-batch 0)" in str(raised.value)
    with pytest.raises(ScheduleDeadlock, match="which no rank computes"):
        simulate_schedule([first[1:], second], ranks=2, chunks=1, schedule="1f1b")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_s": [1.0]}, "forward_s has 1 numbers; expected one for each of the 2 stages"),
        ({"forward_s": -1.0}, "forward_s of stage 0 is -1.0"),
        ({"backward_s": float("nan")}, "backward_s of stage 0 is nan"),
        ({"backward_s": float("inf")}, "backward_s of stage 0 is inf"),
        ({"weight_s": 3.0}, "weight_s of stage 0 is 3.0; it is a part of backward_s"),
        ({"transfer_s": -0.1}, "transfer_s is -0.1"),
        ({"ranks": 3}, "actions for 2 ranks; expected 3"),
    ],
)
def test_impossible_costs_are_named(changes: dict[str, object], words: str) -> None:
    settings = {"ranks": 2, "chunks": 1, "schedule": "1f1b"} | changes
    with pytest.raises(ValueError, match=words):
        simulate_schedule(actions(pp(2)), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([[Action("F", 1, 0)], []], "that stage lives on rank 1"),
        ([[Action("F", 7, 0)], []], "there are stages 0 to 1"),
        ([[Action("F", 0, 0), Action("F", 0, 0)], []], "twice"),
    ],
)
def test_actions_that_do_not_belong_are_named(orders: list[list[Action]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate_schedule(orders, ranks=2, chunks=1, schedule="1f1b")


@given(pipelines())
def test_a_formula_is_written_exactly_where_there_is_one(term: pp) -> None:
    formula, text = bubble_formula(term), bubble_formula_text(term)
    assert (formula is None) == (text is None) == (term.schedule == "zero-bubble" and term.chunks > 1)
    if text is not None and term.schedule != "pipedream":
        numbers = {"n": term.n, "m": term.micro, "v": term.chunks}
        top, bottom = (sum(_terms(part, numbers)) for part in text.split(" / "))
        assert formula == pytest.approx(top / bottom)


def _terms(part: str, numbers: dict[str, int]) -> list[int]:
    """The summands of "(3m + n - 1)"."""
    sign, found = 1, []
    for word in part.strip("()").split():
        if word in "+-":
            sign = 1 if word == "+" else -1
            continue
        value = int("".join(c for c in word if c.isdigit()) or 1)
        for letter in word:
            value *= numbers.get(letter, 1)
        found.append(sign * value)
    return found


def test_a_step_without_cost_has_no_bubble() -> None:
    assert simulate_term(pp(2), forward_s=0, backward_s=0).bubble == 0
