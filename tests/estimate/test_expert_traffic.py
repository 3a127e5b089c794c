"""What expert parallelism sends, by hand: uneven parts, weights that travel apart, recomputation, even routing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.ledger import Entry, Key, ledger_of
from shoal.estimate.expert_traffic import even_routing, expert_traffic
from shoal.layout.routed import Routed

RUN = Routed(
    axis="ep",
    index=1,
    phase="forward",
    trained=True,
    counts_bytes=3 * 48,
    sent_rows=(5, 7, 2),
    received_rows=(1, 7, 4),
    row_bytes=40,
    weight_bytes=0,
    answer_bytes=32,
)


def entry(run: Routed, phase: str) -> Entry:
    return ledger_of(expert_traffic([run])).entries.get(Key("ep", phase, "all_to_all"), Entry())


def test_rows_and_answers_to_others_are_counted_and_what_stays_is_not() -> None:
    assert entry(RUN, "forward") == Entry(3, 6, 2 * 48 + 7 * 40 + 5 * 32)
    assert entry(RUN, "backward") == Entry(2, 4, 7 * 32 + 5 * 40)


def test_weights_that_travel_apart_are_one_exchange_more_each_way() -> None:
    run = replace(RUN, weight_bytes=4)
    assert entry(run, "forward") == Entry(4, 8, 2 * 48 + 7 * 40 + 7 * 4 + 5 * 32)
    assert entry(run, "backward") == Entry(3, 6, 7 * 32 + 5 * 4 + 5 * 40)


def test_an_evaluation_and_a_repetition_have_no_backward_of_their_own() -> None:
    for phase in ("evaluate", "backward"):
        run = replace(RUN, phase=phase, trained=False)
        assert entry(run, phase) == Entry(3, 6, 2 * 48 + 7 * 40 + 5 * 32)
        assert len(ledger_of(expert_traffic([run])).entries) == 1


def test_nothing_routed_still_costs_the_counts_and_the_calls() -> None:
    run = replace(RUN, sent_rows=(0, 9, 0), received_rows=(0, 9, 0))
    assert entry(run, "forward") == Entry(3, 6, 96)
    assert entry(run, "backward") == Entry(2, 4, 0)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 50), st.integers(1, 4), st.integers(1, 64), st.booleans())
def test_even_routing_sends_as_much_as_it_receives_up_to_a_row_a_rank(
    ranks: int, share: int, tokens: int, slots: int, width: int, recomputed: bool
) -> None:
    runs = even_routing(
        ranks=ranks, experts=ranks * share, tokens=tokens, slots=slots, width=width, itemsize=4, recomputed=recomputed
    )
    assert len(runs) == 1 + recomputed
    for run in runs:
        assert sum(run.sent_rows) == tokens * slots
        assert abs(sum(run.sent_rows) - sum(run.received_rows)) <= ranks
        assert run.row_bytes == 4 * (width + 1)
    calls = list(expert_traffic(runs))
    assert len(calls) == 5 + 3 * recomputed
    assert {call[0] for call in calls} == {"ep"}


def test_bytes_of_even_routing_by_hand() -> None:
    (run,) = even_routing(ranks=2, experts=8, tokens=16, slots=2, width=32, itemsize=2)
    # 32 rows, half of them to the other rank; 32 elements and a weight there, 32 elements back.
    assert entry(run, "forward").bytes == 8 * (2 * 4 + 2) + 16 * 33 * 2 + 16 * 32 * 2
    assert entry(run, "backward").bytes == 16 * 32 * 2 + 16 * 33 * 2
