"""Embeddings, logits and losses on a cut vocabulary: nobody can tell, save by what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[..., Any]
HERE = "distributed.vocabulary_targets"

STAY_CUT = {
    "shape",
    "size",
    "dims",
    "is a tensor",
    "cross entropy",
    "cross entropy module",
    "cross entropy of classes second",
    "cross entropy of one",
}


@pytest.mark.parametrize(("world", "words"), [(2, 7), (3, 7), (2, 6)])
def test_cut_logits_may_be_used_in_any_way(ranks: Ranks, world: int, words: int) -> None:
    for found in ranks(f"{HERE}:logits", {"words": words}, ranks=world):
        assert len(found["uses"]) > 60
        assert [name for name, use in found["uses"].items() if not use["right"]] == []
        assert {name for name, use in found["uses"].items() if not use["gathered"]} == STAY_CUT


def test_cut_logits_are_not_changed_in_place_and_may_be_printed_on_one_rank(ranks: Ranks) -> None:
    for found in ranks(f"{HERE}:logits", {"words": 7}, ranks=2):
        said = found["said"]
        for change in ("in place", "item set", "added", "hook", "data"):
            assert "use the form that gives a new tensor" in said[change]
        assert "CutLogits(shape=(2, 3, 7)" in said["shown without a word"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_cross_entropy_on_parts_is_that_of_the_whole(ranks: Ranks, world: int) -> None:
    for found in ranks(f"{HERE}:losses", {"words": [5, 7, 12]}, ranks=world):
        assert found["cases"] == 216
        assert found["worst"] <= 1e-12, found["where"]


def test_losses_at_the_edge(ranks: Ranks) -> None:
    for found in ranks(f"{HERE}:odd_losses", ranks=2):
        assert len(found) == 9
        assert [name for name, right in found.items() if not right] == []


@pytest.mark.parametrize("world", [2, 3])
def test_embeddings_of_every_kind(ranks: Ranks, world: int) -> None:
    for found in ranks(f"{HERE}:embedding", ranks=world):
        assert len(found) == 15
        assert {name: off for name, off in found.items() if off > 1e-14} == {}
