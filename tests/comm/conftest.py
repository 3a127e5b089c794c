"""Two ranks in one process, joined as two processes of a host are."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shoal.comm.peers import Peers
from shoal.comm.transport.shared import SharedLink, offer, take


@pytest.fixture
def links() -> Iterator[tuple[SharedLink, SharedLink]]:
    ends = socket.socketpair()
    memory = offer(ends[0])
    pair = SharedLink(1, ends[0], memory, first=True), SharedLink(0, ends[1], take(ends[1]), first=False)
    for end in ends:
        end.setblocking(False)
    yield pair
    for link in pair:
        link.close()


@pytest.fixture
def peers(links: tuple[SharedLink, SharedLink]) -> list[Peers]:
    return [Peers(0, 2, {1: links[0]}), Peers(1, 2, {0: links[1]})]
