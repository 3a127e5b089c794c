"""Large messages within a host: lent by the sender, fetched by the reader, and safe when either gives up."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from comm.serial import numbers, summed, together
from shoal.comm.collectives import direct
from shoal.comm.collectives.algorithms import ALL_REDUCE
from shoal.comm.peers import Peers
from shoal.comm.point_to_point import PointToPoint
from shoal.comm.transfer import LARGE_BYTES
from shoal.comm.transport.link import PeerLost
from shoal.comm.transport.peer_memory import PeerMemory
from shoal.comm.transport.ring_buffer import HEAD
from shoal.comm.transport.shared import SharedLink
from shoal.comm.vector import OPERATIONS, Vector

ELEMENTS = LARGE_BYTES // 4 + 1001
"""Of four bytes: enough to be lent, and no multiple of anything."""


def _permitted() -> bool:
    here, there = socket.socketpair()
    with here, there:
        word = torch.tensor([20])
        return PeerMemory(here).shows(word.data_ptr(), 20)


needs_permission = pytest.mark.skipif(not _permitted(), reason="the kernel lets no process read another's memory here")


def _exchange(peers: list[Peers]) -> None:
    """An all-to-all, and that it is right."""
    given = [numbers(rank, 2 * ELEMENTS, torch.float32) for rank in range(2)]
    into = [torch.empty(2 * ELEMENTS) for _ in range(2)]
    going, coming = ([Vector(tensor).parts(2) for tensor in tensors] for tensors in (given, into))
    together(peers, "all_to_all", lambda each: direct.direct_all_to_all(each, going[each.rank], coming[each.rank]))
    halves = [tensor.view(2, -1) for tensor in given]
    for rank in range(2):
        assert torch.equal(into[rank], torch.cat([half[rank] for half in halves]))


def _written(links: tuple[SharedLink, SharedLink]) -> int:
    return sum(link._out.words[HEAD] for link in links)


@needs_permission
def test_once_a_reader_can_fetch_large_messages_are_no_longer_written(
    links: tuple[SharedLink, SharedLink], peers: list[Peers]
) -> None:
    _exchange(peers)
    before = _written(links)
    assert before > 2 * LARGE_BYTES
    for _ in range(3):
        _exchange(peers)
    assert _written(links) - before < 1000
    assert [each.sent.bytes for each in peers] == [4 * 4 * ELEMENTS] * 2


def test_where_it_is_not_permitted_large_messages_are_written(
    links: tuple[SharedLink, SharedLink], peers: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerMemory, "shows", lambda self, address, value: False)
    for turn in range(1, 4):
        _exchange(peers)
        assert _written(links) > turn * 2 * LARGE_BYTES


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_all_reduce_of_large_vectors(peers: list[Peers], algorithm: str, dtype: torch.dtype) -> None:
    for _ in range(3):
        given = [numbers(rank, 4 * ELEMENTS, dtype) for rank in range(2)]
        expected = summed(given)
        together(
            peers,
            "all_reduce",
            lambda each, g=given: ALL_REDUCE[algorithm].steps(each, Vector(g[each.rank]), OPERATIONS["sum"]),
        )
        assert all(torch.equal(result, expected) for result in given)


@needs_permission
def test_a_sender_is_not_done_before_its_memory_was_read(peers: list[Peers]) -> None:
    _exchange(peers)
    sender, reader = (each.begin("broadcast") for each in peers)
    given, into = numbers(3, ELEMENTS, torch.float32), torch.empty(ELEMENTS)
    send, receive = sender.send(1, Vector(given)), reader.receive(0, Vector(into))
    send.advance()
    assert not send.advance()
    assert not send.done
    receive.advance()
    assert receive.done
    assert torch.equal(into, given)
    assert send.advance()
    assert send.done


@needs_permission
def test_what_was_taken_back_is_not_taken_for_the_message(
    links: tuple[SharedLink, SharedLink], peers: list[Peers]
) -> None:
    _exchange(peers)
    sender, reader = (each.begin("broadcast") for each in peers)
    sender.send(1, Vector(torch.zeros(ELEMENTS))).advance()
    links[0].take_back()
    with pytest.raises(PeerLost, match="rank 0 disconnected: it gave up on the message"):
        reader.receive(0, Vector(torch.empty(ELEMENTS))).advance()


@pytest.mark.processes
@needs_permission
def test_a_lender_that_has_died_is_named(links: tuple[SharedLink, SharedLink], peers: list[Peers]) -> None:
    _exchange(peers)
    sender, reader = (each.begin("broadcast") for each in peers)
    sender.send(1, Vector(torch.zeros(ELEMENTS))).advance()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=30)
    links[1]._peer_memory._process = ended.pid
    with pytest.raises(PeerLost, match="rank 0 disconnected: its memory cannot be read"):
        reader.receive(0, Vector(torch.empty(ELEMENTS))).advance()


@needs_permission
def test_a_reader_that_has_died_is_named(links: tuple[SharedLink, SharedLink], peers: list[Peers]) -> None:
    _exchange(peers)
    send = peers[0].begin("broadcast").send(1, Vector(torch.zeros(ELEMENTS)))
    send.advance()
    assert not links[0].arm(to_write=True)
    links[1].close()
    links[0].disarm()
    with pytest.raises(PeerLost, match="rank 1 disconnected"):
        send.advance()


def test_a_message_that_was_given_away_keeps_its_memory(links: tuple[SharedLink, SharedLink]) -> None:
    """A copy made for one message has no other owner."""
    here, there = PointToPoint({1: links[0]}, "here"), PointToPoint({0: links[1]}, "there")
    given = numbers(1, 4 << 20, torch.float32)
    letter = here.send(1, 0, Vector(given.clone()), background=False)
    for _ in range(4):
        torch.empty(4 << 20).fill_(-1.0)
    into = torch.empty(4 << 20)
    wanted = there.receive(0, 0, Vector(into), background=False)
    while not wanted.done:
        here._advance()
        there._advance()
    assert letter.done
    assert torch.equal(into, given)
    for mail in (here, there):
        mail.close()
