"""How two processes recognise each other: each proves that it holds the group's secret, for this connection only.

Both sides are generators that yield the event they wait for, so any number of handshakes run side by side in one
thread. The answering side sends a challenge first. A caller that cannot answer it learns nothing. The keys of the link
are derived from what both have sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Generator
from dataclasses import dataclass

from shoal.comm.transport.token import derive

_NONCE = 16
_PROOF = 32
_HELLO = struct.Struct("<III16s")
"""The calling rank, the called rank, which of the pair's links this is to be, and a nonce."""

Steps = Generator[int, None, "Recognised"]
"""Yields selectors.EVENT_READ or EVENT_WRITE."""


class Stranger(ConnectionError):
    """The other end does not hold the secret, or is not the rank that was called."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """The rank at the other end, and the keys of the two directions."""

    rank: int
    channel: int
    sends: bytes
    receives: bytes


def call(connection: socket.socket, secret: bytes, *, rank: int, other: int, channel: int) -> Steps:
    """The side that connects."""
    _require_own_user(connection)
    challenge = yield from _receive(connection, _NONCE)
    fresh = secrets.token_bytes(_NONCE)
    hello = _HELLO.pack(rank, other, channel, fresh)
    yield from _send(connection, hello + _proof(secret, b"call", challenge + hello))
    answer = yield from _receive(connection, _PROOF)
    if not hmac.compare_digest(answer, _proof(secret, b"answer", challenge + hello)):
        raise Stranger("it does not hold this job's token")
    calls, answers = _keys(secret, challenge + hello)
    return Recognised(other, channel, sends=calls, receives=answers)


def answer(connection: socket.socket, secret: bytes, *, rank: int) -> Steps:
    """The side that listens."""
    _require_own_user(connection)
    challenge = secrets.token_bytes(_NONCE)
    yield from _send(connection, challenge)
    hello = yield from _receive(connection, _HELLO.size)
    proof = yield from _receive(connection, _PROOF)
    caller, called, channel, _ = _HELLO.unpack(hello)
    if not hmac.compare_digest(proof, _proof(secret, b"call", challenge + hello)) or called != rank:
        raise Stranger("it does not hold this job's token")
    yield from _send(connection, _proof(secret, b"answer", challenge + hello))
    calls, answers = _keys(secret, challenge + hello)
    return Recognised(caller, channel, sends=answers, receives=calls)


def _require_own_user(connection: socket.socket) -> None:
    """Processes of one host that become ranks of one job belong to one user."""
    if connection.family != socket.AF_UNIX:
        return
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user = struct.unpack("3i", credentials)[1]
    if user != os.geteuid():
        raise Stranger(f"it is a process of another user (uid {user}; this one has {os.geteuid()})")


def _keys(secret: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    key = hmac.digest(secret, b"link" + transcript, "sha256")
    return derive(key, "from the caller"), derive(key, "from the called")


def _proof(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + transcript, "sha256")


def _send(connection: socket.socket, data: bytes) -> Generator[int, None, None]:
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE


def _receive(connection: socket.socket, count: int) -> Generator[int, None, bytes]:
    got = b""
    while len(got) < count:
        try:
            more = connection.recv(count - len(got))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not more:
            raise ConnectionError("it closed the connection")
        got += more
    return got
