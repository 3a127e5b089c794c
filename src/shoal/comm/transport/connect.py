"""How the ranks of a group find and recognise each other: every pair is joined by links of its own.

Ranks publish where they listen in the group's store; of each pair the higher rank calls the lower. Both prove that
they hold the job's secret before anything else is said, so a stranger who finds the port learns nothing. Listeners
close as soon as the group is complete. Ranks of one host never touch the network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from shoal.comm.transport.descriptors import make_room
from shoal.comm.transport.link import Link
from shoal.comm.transport.shared import SharedLink, offer, take
from shoal.comm.transport.tcp import TcpLink

_SIOCGIFADDR = 0x8915
_NONCE = 16
_HELLO = struct.Struct("<II16s")
"""Who calls, which of the pair's links this is to be, and something fresh to answer."""


class CannotConnect(ConnectionError):
    """The links of a group could not be made."""


@dataclass(frozen=True)
class Connected:
    """The links of one rank to all others, one dictionary for each channel, and who shares a host."""

    channels: tuple[dict[int, Link], ...]
    hosts: tuple[tuple[int, ...], ...]


def connect(
    store: Any, rank: int, size: int, *, channels: int, secret: bytes, timeout: timedelta, carrier: str = "auto"
) -> Connected:
    """Joins this rank to all others of its group. `carrier` is "auto", or "tcp" to do without shared memory."""
    links: tuple[dict[int, Link], ...] = tuple({} for _ in range(channels))
    store.set(f"host/{rank}", host_name())
    names = [store.get(f"host/{other}").decode() for other in range(size)]
    hosts: dict[str, list[int]] = {}
    for other, name in enumerate(names):
        hosts.setdefault(name, []).append(other)
    grouped = tuple(tuple(ranks) for ranks in hosts.values())
    if size == 1:
        return Connected(links, grouped)
    make_room(channels * (size - 1), what=f"joining rank {rank} to {size - 1} others by {channels} links each")
    deadline = time.monotonic() + timeout.total_seconds()
    nearby = {other for other, name in enumerate(names) if name == names[rank] and carrier == "auto"} - {rank}
    far = set(range(size)) - nearby - {rank}
    with contextlib.ExitStack() as listening:
        address: dict[str, Any] = {}
        listeners = []
        if nearby:
            listeners.append(listening.enter_context(_listen_nearby()))
            address["nearby"] = listeners[-1].getsockname()[1:].decode()
        if far:
            listeners.append(listening.enter_context(_listen_far()))
            address["far"] = listeners[-1].getsockname()[:2]
        store.set(f"address/{rank}", json.dumps(address))
        for other in range(rank):
            theirs = json.loads(store.get(f"address/{other}"))
            for channel in range(channels):
                links[channel][other] = _call(theirs, other, rank, channel, secret, deadline, near=other in nearby)
        _answer(listeners, links, rank, size, secret, deadline, nearby)
    return Connected(links, grouped)


def host_name() -> str:
    """The same for processes that can share memory and reach each other by name, and for no others."""
    boot = "unknown"
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    with contextlib.suppress(OSError):
        boot += f"/{os.stat('/proc/self/ns/net').st_ino}/{os.stat('/proc/self/ns/ipc').st_ino}"
    return f"{socket.gethostname()}/{boot}"


def job_secret(store: Any, rank: int) -> bytes:
    """What the ranks of a job alone know: its token, and a number drawn by its first rank."""
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    return hashlib.sha256(os.environ.get("SHOAL_TOKEN", "").encode() + b"/" + bytes(store.get("secret"))).digest()


def _listen_nearby() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A name that starts with a zero byte lives in no file system: nothing is left behind.
    listener.bind(b"\0shoal-" + secrets.token_hex(16).encode())
    listener.listen(1024)
    return listener


def _listen_far() -> socket.socket:
    address = own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def own_address() -> str:
    """The address under which other hosts reach this one: of the interface named, or of the one that leads to the
    job's meeting place; loopback where there is no such place."""
    interface = os.environ.get("SHOAL_INTERFACE") or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            except OSError as error:
                raise CannotConnect(f"the network interface {interface!r} has no address: {error}") from error
            return socket.inet_ntoa(packed[20:24])
    master = os.environ.get("MASTER_ADDR", "")
    if not master or master == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(master).is_loopback:
            return master
    try:
        family, kind, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # Sends nothing; the kernel picks the way.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CannotConnect(f"no way leads to MASTER_ADDR {master!r}: {error}") from error


def _call(
    theirs: dict[str, Any], other: int, rank: int, channel: int, secret: bytes, deadline: float, *, near: bool
) -> Link:
    where = "\0" + theirs["nearby"] if near else tuple(theirs["far"])
    family = socket.AF_UNIX if near else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.connect(where)
        fresh = secrets.token_bytes(_NONCE)
        hello = _HELLO.pack(rank, channel, fresh)
        challenge = _exactly(connection, _NONCE)
        connection.sendall(hello + _proof(secret, b"call", challenge + hello))
        if not hmac.compare_digest(_exactly(connection, 32), _proof(secret, b"answer", fresh + challenge)):
            raise CannotConnect(f"who answered as rank {other} does not hold this job's token")
        if near:
            link: Link = SharedLink(other, connection, take(connection), first=False)
            connection.setblocking(False)
            return link
        return TcpLink(other, connection)
    except OSError as error:
        connection.close()
        if isinstance(error, CannotConnect):
            raise
        raise CannotConnect(f"rank {rank} could not reach rank {other} at {where!r}: {error}") from error


def _answer(
    listeners: Sequence[socket.socket], links: tuple[dict[int, Link], ...], rank: int, size: int, secret: bytes,
    deadline: float, nearby: set[int],
) -> None:  # fmt: skip
    for listener in listeners:
        near = listener.family == socket.AF_UNIX
        missing = {
            (other, channel)
            for other in range(rank + 1, size)
            for channel in range(len(links))
            if (other in nearby) == near
        }
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(str(other) for other in sorted({other for other, _ in missing}))
                raise CannotConnect(f"rank {rank} waited in vain for rank {names} to connect")
            listener.settimeout(left)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            caller = _recognise(connection, secret, min(10.0, left))
            if caller not in missing:
                connection.close()  # A stranger, or a caller who broke off: the right one will call yet.
                continue
            missing.discard(caller)
            other, channel = caller
            if near:
                links[channel][other] = SharedLink(other, connection, offer(connection), first=True)
                connection.setblocking(False)
            else:
                links[channel][other] = TcpLink(other, connection)


def _recognise(connection: socket.socket, secret: bytes, patience_s: float) -> tuple[int, int] | None:
    connection.settimeout(patience_s)
    try:
        challenge = secrets.token_bytes(_NONCE)
        connection.sendall(challenge)
        hello, proof = _exactly(connection, _HELLO.size), _exactly(connection, 32)
        if not hmac.compare_digest(proof, _proof(secret, b"call", challenge + hello)):
            return None
        caller, channel, fresh = _HELLO.unpack(hello)
        connection.sendall(_proof(secret, b"answer", fresh + challenge))
        return caller, channel
    except OSError:
        return None


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = connection.recv(count - len(got))
        if not more:
            raise ConnectionError("the other process closed the connection")
        got += more
    return got
