"""Ranks whose links pass through a relay, or whose ports strangers have found first."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.transport import connect as connect_module
from shoal.launch.channel import Channel
from shoal.launch.join import join, leave

HELLO_BYTES = 28 + 32
"""What a caller says before its link is made."""
ANSWER_BYTES = 16 + 32
"""What a listener says before that."""


class Behind(socket.socket):
    """A listener that publishes another address than its own: that of the relay in front of it."""

    published: Any = None

    def getsockname(self) -> Any:
        return self.published


class Relay:
    """Passes bytes on between callers and a listener; what callers (or, `back`, the listener) say after their greeting
    is tampered with."""

    def __init__(self, how: str, back: bool = False) -> None:
        self.how, self.back = how, back
        self.entrance = socket.create_server(("127.0.0.1", 0))
        self.altered = 0
        self.greetings: list[bytes] = []
        """What each caller, and each listener, said first."""

    def in_front_of(self, listener: socket.socket) -> Behind:
        behind = Behind(fileno=listener.detach())
        target = socket.socket.getsockname(behind)
        behind.published = self.entrance.getsockname()
        threading.Thread(target=self._accept, args=(target,), daemon=True).start()
        return behind

    def _accept(self, target: Any) -> None:
        while True:
            caller, _ = self.entrance.accept()
            try:
                inner = socket.create_connection(target)
            except OSError:
                return caller.close()  # The listener is closed: its group is complete.
            there, back = ("nothing", self.how) if self.back else (self.how, "nothing")
            threading.Thread(target=self._pass_on, args=(caller, inner, there, HELLO_BYTES), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(inner, caller, back, ANSWER_BYTES), daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, how: str, greeting: int) -> None:
        with contextlib.suppress(OSError):
            self._pass_all(source, to, how, greeting)
        for end in (source, to):
            end.close()

    def _pass_all(self, source: socket.socket, to: socket.socket, how: str, greeting: int) -> None:
        seen, held = 0, b""
        while data := source.recv(1 << 16):
            start, seen = seen, seen + len(data)
            if not start:
                self.greetings.append(data[:greeting])
            if start < greeting or how == "nothing":
                to.sendall(data)
                continue
            self.altered += 1
            if how == "flip" and len(data) > 1000:
                data = bytearray(data)
                data[-41] ^= 0x80  # In a number.
            elif how == "repeat":
                data = data + data
            elif how == "drop":
                data = b""
            elif how == "reorder":
                held, data = (b"", data + held) if held else (data, b"")
            elif how == "cut":
                return
            elif how == "truncate" and len(data) > 1000:
                to.sendall(data[: len(data) // 2])
                return
            elif how == "reset" and len(data) > 1000:
                to.sendall(data[: len(data) // 2])
                for end in (source, to):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.close()
                return
            elif how == "insert":
                data = os.urandom(64) + data
            to.sendall(data)


def through_a_relay(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Rank 1's bytes to rank 0 pass through a relay; what each rank receives of some sums, or what it is told."""
    os.environ["SHOAL_CARRIER"] = "tcp"
    relay = Relay("nothing", arguments.get("back", False))
    if channel.rank == 0:
        listen = connect_module._listen_far
        connect_module._listen_far = lambda: relay.in_front_of(listen())
    told = ""
    sums = []
    try:
        join(backend="shoal")
        relay.how = arguments["how"]
        group = dist.new_group(backend="shoal", timeout=timedelta(seconds=4))
        for _ in range(3):
            value = torch.full((100_000,), 1.0)
            dist.all_reduce(value, group=group)
            sums.append([value.min().item(), value.max().item()])
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return {"told": told, "sums": sums, "altered": relay.altered}


def among_strangers(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Each port is found by strangers before a rank calls: some say nothing, some say anything."""
    os.environ["SHOAL_CARRIER"] = arguments["carrier"]
    strangers: list[socket.socket] = []
    chance = random.Random(channel.rank)

    def visited(listen: Any) -> Any:
        def call() -> Any:
            listener = listen()
            for number in range(arguments["count"]):
                stranger = socket.socket(listener.family, socket.SOCK_STREAM)
                stranger.connect(listener.getsockname())
                if number % 2:
                    stranger.sendall(chance.randbytes(chance.choice([1, 16, 60, 4096])))
                strangers.append(stranger)
            return listener

        return call

    for name in ("_listen_far", "_listen_nearby"):
        setattr(connect_module, name, visited(getattr(connect_module, name)))
    start_s = time.monotonic()
    join(backend="shoal")
    value = torch.tensor([channel.rank + 1.0])
    dist.all_reduce(value)
    took_s = time.monotonic() - start_s
    leave()
    return {"sum": value.item(), "took_s": took_s, "strangers": len(strangers)}


def replayed(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Two groups, one after the other, with strangers at rank 0's port of the second. What they say was said in the
    first ("replay"), is what the port says ("reflect"), or the first part of a greeting, after which they wait
    ("half")."""
    os.environ["SHOAL_CARRIER"] = "tcp"
    relay, how = Relay("nothing"), arguments["how"]
    strangers: list[socket.socket] = []
    listen = connect_module._listen_far

    def visited() -> socket.socket:
        listener = listen()
        for number in range(arguments["count"]):
            stranger = socket.create_connection(listener.getsockname())
            hello = relay.greetings[number % len(relay.greetings)]
            strangers.append(stranger)
            if how == "reflect":
                threading.Thread(target=_send_back, args=(stranger,), daemon=True).start()
            else:
                stranger.sendall(hello if how == "replay" else hello[: 1 + number % (len(hello) - 1)])
        return listener

    if channel.rank == 0:
        connect_module._listen_far = lambda: relay.in_front_of(listen())
    join(backend="shoal")
    first = torch.tensor([channel.rank + 1.0])
    dist.all_reduce(first)
    if channel.rank == 0:
        connect_module._listen_far = visited
    start_s = time.monotonic()
    group = dist.new_group(backend="shoal", timeout=timedelta(seconds=30))
    second = torch.tensor([channel.rank + 1.0])
    dist.all_reduce(second, group=group)
    took_s = time.monotonic() - start_s
    leave()
    answers = [] if how == "reflect" else [len(_all_of(stranger)) for stranger in strangers]
    return {"sums": [first.item(), second.item()], "took_s": took_s, "answers": answers, "strangers": len(strangers)}


def _send_back(stranger: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := stranger.recv(64):
            stranger.sendall(data * 4)


def _all_of(stranger: socket.socket) -> bytes:
    """Everything that the other end has said, which must have hung up by now."""
    stranger.settimeout(5)
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := stranger.recv(64):
            said += data
    return said
