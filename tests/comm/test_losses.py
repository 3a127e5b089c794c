"""Ranks that are left agree on whether something they did together counts, whoever is lost in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shoal.comm import losses
from shoal.comm.losses import Losses
from shoal.comm.transport.link import PeerLost
from shoal.comm.transport.signed_store import SignedStore

ISLANDS = [(0,), (1,), (2, 3)]
Act = Callable[[int, int], Any]


def run(folder: Path, act: Act, *, ranks: tuple[int, ...]) -> dict[int, tuple[Any, list[str]]]:
    """`act(rank, attempt)` on each rank that lives: what came of it, and what was undone and lost meanwhile."""
    store = dist.HashStore()

    def one(rank: int) -> tuple[Any, list[str]]:
        mine, notes, attempts = Losses(folder, SignedStore(store, b"key"), rank, ISLANDS), list[str](), []

        def attempt() -> Any:
            attempts.append(rank)
            return act(rank, len(attempts))

        try:
            result = mine.together(
                attempt, undo=lambda: notes.append("undone"), lose=lambda lost, why: notes.append(f"{lost} {why}")
            )
        except Exception as error:
            result = error
        return result, notes

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(one, ranks), strict=True))


def test_what_all_have_done_counts(tmp_path: Path) -> None:
    found = run(tmp_path, lambda rank, attempt: rank, ranks=(0, 1, 2, 3))
    assert found == {rank: (rank, []) for rank in range(4)}


@pytest.mark.parametrize("unlucky", [(0,), (1,), (0, 1)])
def test_those_that_were_done_undo_it_with_those_that_were_not(tmp_path: Path, unlucky: tuple[int, ...]) -> None:
    (tmp_path / "3").write_text("killed")
    (tmp_path / "2").write_text("killed with it")

    def act(rank: int, attempt: int) -> int:
        if attempt == 1 and rank in unlucky:
            raise PeerLost(3)
        return attempt

    assert run(tmp_path, act, ranks=(0, 1)) == dict.fromkeys((0, 1), (2, ["undone", "[2, 3] killed with it"]))


def test_a_lost_rank_does_not_spoil_what_the_others_have_done(tmp_path: Path) -> None:
    for rank in (2, 3):
        (tmp_path / str(rank)).write_text("killed")
    assert run(tmp_path, lambda rank, attempt: attempt, ranks=(0, 1)) == dict.fromkeys((0, 1), (1, []))


def test_a_broken_connection_alone_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "DECIDE_S", 0.1)

    def act(rank: int, attempt: int) -> None:
        if rank == 1:
            raise PeerLost(2)

    found = run(tmp_path, act, ranks=(0, 1, 2, 3))
    assert all(isinstance(result, PeerLost) for result, _ in found.values())


def test_an_error_of_another_kind_is_passed_on(tmp_path: Path) -> None:
    def act(rank: int, attempt: int) -> None:
        raise ValueError("the disk is full")

    found = run(tmp_path, act, ranks=(0, 1, 2, 3))
    assert [str(result) for result, _ in found.values()] == ["the disk is full"] * 4
