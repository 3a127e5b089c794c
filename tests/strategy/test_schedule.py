"""Pipeline schedules: complete, in an order that can be run, and within the memory that each is known for."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.strategy.legality.check import IllegalStrategy
from shoal.strategy.schedule import Action, actions, last_backward, rank_stages, stage_rank, steady
from shoal.strategy.terms import pp


@st.composite
def pipelines(draw: st.DrawFn, *schedules: str) -> pp:
    """Any legal pipeline, fewer micro-batches than ranks included."""
    schedule = draw(st.sampled_from(schedules or ("gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream")))
    ranks, chunks, micro = draw(st.integers(1, 9)), 1, draw(st.integers(1, 20))
    if schedule == "interleaved":
        chunks, micro = draw(st.integers(2, 5)), ranks * draw(st.integers(1, 4))
    if schedule == "zero-bubble":
        chunks = draw(st.integers(1, 4))
    return pp(ranks, schedule, micro=micro, chunks=chunks)


def kept(order: list[Action]) -> int:
    """The most activations at a time, from the forward to the end of the whole backward."""
    now = most = 0
    for action in order:
        now += {"F": 1, "B": 0, "W": -1, "BW": -1}[action.kind]
        most = max(most, now)
    return most


@given(pipelines())
def test_every_micro_batch_passes_every_stage_once_in_each_direction(term: pp) -> None:
    counted = Counter(action for order in actions(term) for action in order)
    kinds = ("F", "B", "W") if term.schedule == "zero-bubble" else ("F", "BW")
    stages, micros = range(term.n * term.chunks), range(term.micro)
    assert counted == Counter(Action(kind, s, m) for kind in kinds for s in stages for m in micros)  # type: ignore[arg-type]


@given(pipelines())
def test_every_rank_computes_its_own_stages_only(term: pp) -> None:
    for rank, order in enumerate(actions(term)):
        own = rank_stages(rank, term.n, term.chunks, term.schedule)
        assert {action.stage for action in order} == set(own)
        assert len(own) == term.chunks


@given(pipelines())
def test_ranks_that_wait_for_what_they_need_next_all_reach_their_end(term: pp) -> None:
    """Blocking receives in the order of the actions, sends that wait for nobody: a mailbox without a clock."""
    left = [list(reversed(order)) for order in actions(term)]
    last, results = term.n * term.chunks - 1, set()
    moved = True
    while moved:
        moved = False
        for order in left:
            while order:
                kind, stage, micro = order[-1].kind, order[-1].stage, order[-1].micro
                needs = {
                    "F": {("F", stage - 1, micro)} if stage else set(),
                    "W": {("B", stage, micro)},
                }.get(kind, {("F", stage, micro)} | ({("B", stage + 1, micro)} if stage < last else set()))
                if not needs <= results:
                    break
                results.add((kind[0], stage, micro))
                order.pop()
                moved = True
    assert left == [[] for _ in left]


@given(pipelines())
def test_activations_and_gradients_between_two_ranks_are_used_in_the_order_they_are_sent(term: pp) -> None:
    """Not so where zero-bubble deals out more than two chunks: there only the messages into one stage keep their order,
    as each stage takes its micro-batches in order.
    """
    assume(term.schedule != "zero-bubble" or term.chunks <= 2)
    stages = term.n * term.chunks
    homes = [stage_rank(stage, term.n, term.chunks, term.schedule) for stage in range(stages)]
    sent: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    used: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, order in enumerate(actions(term)):
        for action in order:
            way = {"F": 1, "B": -1, "BW": -1}.get(action.kind, 0)
            to, source = action.stage + way, action.stage - way
            if way and 0 <= to < stages and homes[to] != rank:
                sent[rank, homes[to], action.kind].append((to, action.micro))
            if way and 0 <= source < stages and homes[source] != rank:
                used[homes[source], rank, action.kind].append((action.stage, action.micro))
    assert sent == used


@given(pipelines())
def test_each_stage_takes_its_micro_batches_in_order(term: pp) -> None:
    for order in actions(term):
        for key in {(action.kind, action.stage) for action in order}:
            assert [a.micro for a in order if (a.kind, a.stage) == key] == list(range(term.micro))


@given(pipelines())
def test_the_last_backward_completes_the_weight_gradients_of_its_stage(term: pp) -> None:
    for rank, order in enumerate(actions(term)):
        for stage in rank_stages(rank, term.n, term.chunks, term.schedule):
            last = last_backward(order, stage)
            after = order[order.index(last) + 1 :]
            assert last.stage == stage
            assert last.kind in ("W", "BW")
            assert not [action for action in after if action.stage == stage]


@given(pipelines("gpipe"))
def test_gpipe_keeps_all_micro_batches(term: pp) -> None:
    assert [kept(order) for order in actions(term)] == [term.micro] * term.n


@given(pipelines("1f1b", "pipedream"))
def test_1f1b_keeps_one_micro_batch_for_each_rank_that_is_left_to_the_end(term: pp) -> None:
    assert [kept(order) for order in actions(term)] == [min(term.micro, term.n - rank) for rank in range(term.n)]


@given(pipelines("zero-bubble"))
def test_zero_bubble_keeps_no_more_than_the_first_rank_of_1f1b(term: pp) -> None:
    assert max(kept(order) for order in actions(term)) <= term.n * term.chunks


@given(pipelines("interleaved"))
def test_interleaving_keeps_its_warm_up_and_one_more(term: pp) -> None:
    for rank, order in enumerate(actions(term)):
        warm_up = (term.chunks - 1) * term.n + 2 * (term.n - 1 - rank)
        assert kept(order) == min(term.chunks * term.micro, warm_up + 1)


def test_a_v_brings_the_loss_back_to_the_first_rank() -> None:
    assert [rank_stages(rank, 3, 2, "zero-bubble") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [rank_stages(rank, 3, 2, "interleaved") for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [rank_stages(rank, 2, 3, "zero-bubble") for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]


def test_1f1b_is_what_the_paper_draws() -> None:
    drawn = ["".join(f"{action.kind[0]}{action.micro}" for action in order) for order in actions(pp(3, micro=4))]
    assert drawn == ["F0F1F2B0F3B1B2B3", "F0F1B0F2B1F3B2B3", "F0B0F1B1F2B2F3B3"]


@given(pipelines("pipedream"), st.integers(1, 30), st.integers(1, 30))
def test_a_run_without_flush_goes_on_where_a_shorter_one_stopped(term: pp, one: int, other: int) -> None:
    short, long = steady(term, min(one, other)), steady(term, max(one, other))
    for rank, (beginning, order) in enumerate(zip(short, long, strict=True)):
        assert order[: len(beginning)] == beginning
        forwards = sum(action.kind == "F" for action in order)
        assert (forwards, len(order) - forwards) == (max(one, other), max(0, max(one, other) - term.n + rank))


@given(pipelines("pipedream"))
def test_a_drained_run_without_flush_is_the_finite_schedule(term: pp) -> None:
    assert steady(term, term.micro, drain=True) == actions(term)


@pytest.mark.parametrize(
    "term",
    [pp(2, "interleaved", micro=4), pp(2, "interleaved", micro=3, chunks=2), pp(2, "1f1b", micro=4, chunks=2)],
    ids=str,
)
def test_an_illegal_pipeline_is_refused_with_its_neighbours(term: pp) -> None:
    with pytest.raises(IllegalStrategy, match="nearest legal"):
        actions(term)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stage_rank(4, 2, 2, "interleaved"), "stage 4: 2 ranks with 2 chunks each hold stages 0 to 3"),
        (lambda: stage_rank(-1, 2, 2, "interleaved"), "stage -1"),
        (lambda: rank_stages(2, 2, 1, "1f1b"), "a pipeline of 2 ranks has ranks 0 to 1"),
        (lambda: last_backward(actions(pp(2))[0], 1), "stage 1 has no backward pass"),
        (lambda: steady(pp(2, "1f1b"), 4), "only pipedream runs without"),
        (lambda: steady(pp(2, "pipedream"), 0), "micros is 0"),
    ],
)
def test_what_is_not_there_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
