"""Ledgers as values: they add like numbers, compare entry by entry, and survive JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.ledger import PHASES, Entry, Key, Ledger, ledger_of
from shoal.comm.wire import FORMULAS

keys = st.builds(
    Key,
    axis=st.sampled_from(["dp", "dp0", "tp", "wörld"]),
    phase=st.sampled_from(PHASES),
    kind=st.sampled_from(list(FORMULAS)),
)
counts = st.integers(0, 1 << 70)
ledgers = st.dictionaries(keys, st.builds(Entry, calls=counts, messages=counts, bytes=counts), max_size=8).map(Ledger)


@given(ledgers)
def test_a_ledger_survives_json(ledger: Ledger) -> None:
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


@given(ledgers, ledgers, ledgers)
def test_ledgers_add_in_any_order(a: Ledger, b: Ledger, c: Ledger) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Ledger() == a
    assert (a + b).bytes == a.bytes + b.bytes
    assert (a + b).calls == a.calls + b.calls
    assert sum(total.bytes for total in (a + b).by_axis().values()) == (a + b).bytes


@given(ledgers)
def test_a_ledger_does_not_differ_from_itself_and_adding_changes_neither_part(ledger: Ledger) -> None:
    before = Ledger(dict(ledger.entries))
    assert ledger.differences(ledger) == []
    _ = ledger + ledger
    assert ledger == before


@given(ledgers, keys)
def test_one_collective_more_is_one_difference_that_names_its_key(ledger: Ledger, key: Key) -> None:
    more = ledger + Ledger({key: Entry(1, 1, 8)})
    lines = more.differences(ledger)
    assert len(lines) == 1
    assert lines[0].startswith(str(key))
    assert len(ledger.differences(more)) == 1


def test_a_message_more_or_less_is_a_difference_even_at_equal_bytes() -> None:
    key = Key("dp", "gradient", "all_reduce")
    assert Ledger({key: Entry(1, 2, 8)}).differences(Ledger({key: Entry(1, 3, 8)}))


def test_an_entry_of_nothing_equals_no_entry() -> None:
    assert Ledger({Key("dp", "loss", "barrier"): Entry()}).differences(Ledger()) == []


def test_phases_are_kept_apart() -> None:
    ledger = ledger_of([("dp", "forward", "all_gather", 64, 4), ("dp", "loss", "all_reduce", 64, 4)])
    assert ledger.only("loss").bytes == 2 * 64 * 3 // 4
    assert ledger.only("forward", "loss") == ledger
    assert ledger.only().entries == {}
