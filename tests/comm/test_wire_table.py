"""The table of all-reduce algorithms in docs/wire.md has a row for each of them, with the formulas that they state."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from pathlib import Path

import pytest

from shoal.comm.collectives.algorithms import ALL_REDUCE

PAGE = Path(__file__).parents[2] / "docs" / "wire.md"
FORMULAS: dict[str, Callable[[int, int], float]] = {
    "2(P-1)": lambda n, P: 2 * (P - 1),
    "log P": lambda n, P: log2(P),
    "2 log P": lambda n, P: 2 * log2(P),
    "2n(P-1)/P": lambda n, P: 2 * n * (P - 1) / P,
    "n log P": lambda n, P: n * log2(P),
}
"""What a cell of the table says, for n bytes and a power of two of P ranks."""
NBYTES, GROUP = 1 << 20, 4


def table() -> dict[str, tuple[str, str]]:
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith('| `"')]
    return {name.strip('`"'): (messages, (*rest, "")[0]) for name, messages, *rest in rows}


def test_every_algorithm_has_a_row() -> None:
    assert list(table()) == [*(name for name in table() if name in ALL_REDUCE), "auto"]
    assert set(table()) == {*ALL_REDUCE, "auto"}


@pytest.mark.parametrize("name", sorted(ALL_REDUCE))
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_row_has_the_formulas_of_the_algorithm(name: str, ranks: int) -> None:
    hosts = (GROUP,) * (ranks // GROUP) if ranks > GROUP else (ranks,)
    found = ALL_REDUCE[name].sent(NBYTES, ranks, hosts)
    for cell, counted in zip(table()[name], (found.messages, found.bytes), strict=True):
        at_most = "up to" in cell
        formula = cell.replace("up to ", "").removesuffix(" each way").partition(",")[0]
        if formula not in FORMULAS:
            assert name == "hierarchical"  # Its messages are those of two rings, in words.
            continue
        expected = FORMULAS[formula](NBYTES, ranks) * (2 if "each way" in cell else 1)
        assert counted <= expected if at_most else counted == int(expected)
