"""How the ranks of a group find each other: every pair is joined by links of its own.

Ranks publish where they listen in the group's store, signed with the job's token. Of each pair the higher rank calls
the lower, and both prove that they hold the token (`handshake.py`) before anything else is sent. Listeners close as
soon as the group is complete. Ranks of one host never touch the network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from shoal.comm.transport.descriptors import make_room
from shoal.comm.transport.handshake import Recognised
from shoal.comm.transport.link import Link
from shoal.comm.transport.meeting import CannotConnect, Meeting
from shoal.comm.transport.protection import METHODS, OFF, available, choose
from shoal.comm.transport.signed_store import SignedStore, StoreTimeout, look_after_all
from shoal.comm.transport.signed_tcp import SignedTcpLink
from shoal.comm.transport.tcp import TcpLink
from shoal.comm.transport.token import derive, is_loopback

_SIOCGIFADDR = 0x8915

__all__ = ["CannotConnect", "Connected", "connect", "host_name", "own_address"]


@dataclass(frozen=True)
class Connected:
    """The links of one rank to all others, one dictionary for each channel, and which ranks share a host."""

    channels: tuple[dict[int, Link], ...]
    hosts: tuple[tuple[int, ...], ...]


def connect(
    store: Any,
    rank: int,
    size: int,
    *,
    channels: int,
    token: bytes,
    name: str,
    timeout: timedelta,
    carrier: str = "auto",
) -> Connected:
    """Joins this rank to all others of its group. `carrier` is "auto", or "tcp" to do without shared memory."""
    links: tuple[dict[int, Link], ...] = tuple({} for _ in range(channels))
    if size == 1:
        return Connected(links, ((0,),))
    deadline = time.monotonic() + timeout.total_seconds()
    signed = SignedStore(store, token, "group", name, str(size))
    # Something fresh from each rank: what was signed for an earlier group, or the proofs of one, are of no use here.
    mine = {"host": host_name(), "fresh": secrets.token_hex(16), "protects": available()}
    signed.set(f"host/{rank}", json.dumps(mine))
    texts = _all_of(signed, "host", range(size), deadline)
    about = [json.loads(text) for text in texts]
    session = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    names = [each["host"] for each in about]
    hosts: dict[str, list[int]] = {}
    for other, host in enumerate(names):
        hosts.setdefault(host, []).append(other)
    protection = choose([each["protects"] for each in about])
    make_room(channels * (size - 1), what=f"joining rank {rank} to {size - 1} others by {channels} links each")
    nearby = {other for other, host in enumerate(names) if host == names[rank] and carrier == "auto"} - {rank}
    far = set(range(size)) - nearby - {rank}
    current = signed.session(session)
    with contextlib.ExitStack() as listening:
        address: dict[str, Any] = {}
        listeners = []
        if nearby:
            listeners.append(listening.enter_context(_listen_nearby()))
            address["nearby"] = listeners[-1].getsockname()[1:].decode()
        if far:
            listeners.append(listening.enter_context(_listen_far()))
            address["far"] = listeners[-1].getsockname()[:2]
        current.set(f"address/{rank}", json.dumps(address))
        calls: dict[tuple[int, int], Any] = {}
        for other, text in enumerate(_all_of(current, "address", range(rank), deadline)):
            where = json.loads(text)
            place = "\0" + where["nearby"] if other in nearby else tuple(where["far"])
            calls |= {(other, channel): place for channel in range(channels)}
        expected = {(other, channel) for other in range(rank + 1, size) for channel in range(channels)}

        def far_link(connection: socket.socket, known: Recognised) -> Link:
            if protection == OFF:
                return TcpLink(known.rank, connection)
            tag = METHODS[protection]
            return SignedTcpLink(known.rank, connection, tag(known.sends), tag(known.receives))

        meeting = Meeting(rank, derive(token, "links", name, session), listeners, far_link)
        meeting.while_waiting(look_after_all)
        for (other, channel), link in meeting.run(calls, expected, deadline).items():
            links[channel][other] = link
    return Connected(links, tuple(tuple(ranks) for ranks in hosts.values()))


def _all_of(signed: SignedStore, what: str, ranks: range, deadline: float) -> list[str]:
    """The values of a key of several ranks."""
    keys = [f"{what}/{other}" for other in ranks]
    try:
        found = signed.get_all(keys, deadline - time.monotonic())
    except StoreTimeout as error:
        names = ", ".join(key.rpartition("/")[2] for key in error.keys)
        raise CannotConnect(f"rank {names} did not publish its address in time") from error
    return [found[key] for key in keys]


def host_name() -> str:
    """The same for processes that can share memory and reach each other by name, and for no others."""
    boot = "unknown"
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    with contextlib.suppress(OSError):
        boot += f"/{os.stat('/proc/self/ns/net').st_ino}/{os.stat('/proc/self/ns/ipc').st_ino}"
    return f"{socket.gethostname()}/{boot}"


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
    job's rendezvous; loopback where there is none."""
    interface = os.environ.get("SHOAL_INTERFACE") or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            except OSError as error:
                raise CannotConnect(f"the network interface {interface!r} has no address: {error}") from error
            return socket.inet_ntoa(packed[20:24])
    master = os.environ.get("MASTER_ADDR", "")
    if is_loopback(master):
        return "127.0.0.1" if master in ("", "localhost") else master
    try:
        family, kind, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # Sends nothing; the kernel picks the way.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CannotConnect(f"no way leads to MASTER_ADDR {master!r}: {error}") from error
