"""Clusters described in a line: what is read, what is refused, and what a slow link does to bytes."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from shoal.comm.choice import choose_all_reduce, network_like
from shoal.comm.emulate import Speed, WrongEmulation, parse_emulation
from shoal.comm.transport.emulated import EmulatedLink, Wires
from shoal.comm.transport.memory import memory_links


def test_a_description_is_read() -> None:
    read = parse_emulation("4x2, 10us, 20GB/s | 100us, 1Gb/s")
    assert (read.hosts, read.per_host, read.world) == (4, 2, 8)
    assert read.inside.latency_s == pytest.approx(10e-6)
    assert (read.inside.bytes_per_s, read.between.bytes_per_s) == (20e9, 1.25e8)
    assert [read.host_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert parse_emulation(" 2 x 1 ,1.5ms, 100Mb/s ").between == Speed(0.0015, 1.25e7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4x2",
        "4x2, 10us",
        "4, 10us, 1GB/s",
        "4x2, 10us, 1GB",
        "4x2, 10, 1GB/s",
        "0x2, 1us, 1GB/s",
        "2x2, 1us, 0GB/s",
        "2x2, 1us, 1GB/s | 1us, 1GB/s | 1us, 1GB/s",
        "2x2, 1.2.3us, 1GB/s",
        "-1x2, 1us, 1GB/s",
    ],
)
def test_what_cannot_be_read_is_refused_in_words(text: str) -> None:
    with pytest.raises(WrongEmulation, match="--emulate"):
        parse_emulation(text)


def _pair(speed: Speed) -> tuple[EmulatedLink, EmulatedLink]:
    here, there = memory_links(2, capacity=1 << 20)
    wires = Wires(memoryview(bytearray(16)), os.memfd_create("test-wires"))
    return EmulatedLink(here[1], speed, wires, 0), EmulatedLink(there[0], speed, wires, 1)


def _carry(sender: EmulatedLink, receiver: EmulatedLink, size: int) -> float:
    data = np.arange(size, dtype=np.int64).astype(np.uint8)
    got = np.zeros(size, dtype=np.uint8)
    start, sent, arrived = time.monotonic(), 0, 0
    while arrived < size:
        sent += sender.write(data[sent:])
        arrived += receiver.read(got[arrived:])
        assert time.monotonic() - start < 20
    assert (got == data).all()
    return time.monotonic() - start


@pytest.mark.parametrize("size", [1, 17, 70_001, 300_000])
def test_bytes_arrive_whole_and_not_before_their_time(size: int) -> None:
    speed = Speed(latency_s=5e-3, bytes_per_s=1e7)
    took = _carry(*_pair(speed), size)
    assert took >= speed.latency_s + size / speed.bytes_per_s
    assert took < speed.latency_s + size / speed.bytes_per_s + 0.2


def test_what_a_link_has_taken_arrives_without_another_call_of_the_sender() -> None:
    """Also where the buffer below wraps around, or is full, in the middle of a chunk."""
    sender, receiver = _pair(Speed(latency_s=0.0, bytes_per_s=1e12))
    for size in [300_000] * 12:
        data = np.arange(size, dtype=np.int64).astype(np.uint8)
        got = np.zeros(size, dtype=np.uint8)
        start, sent, arrived = time.monotonic(), 0, 0
        while arrived < size:
            if sent < size:
                sent += sender.write(data[sent:])
            arrived += receiver.read(got[arrived:])
            assert time.monotonic() - start < 5, f"{sent} bytes were taken and {arrived} arrived"
        assert (got == data).all()


def test_ranks_of_a_host_share_its_wire() -> None:
    speed = Speed(latency_s=0.0, bytes_per_s=1e7)
    links = memory_links(4, capacity=1 << 20)
    wires = Wires(memoryview(bytearray(16)), os.memfd_create("test-wires"))
    senders = [EmulatedLink(links[n][n + 2], speed, wires, 0) for n in range(2)]
    receivers = [EmulatedLink(links[n + 2][n], speed, wires, 1) for n in range(2)]
    data = np.zeros(200_000, dtype=np.uint8)
    sent, arrived, start = [0, 0], [0, 0], time.monotonic()
    while min(arrived) < len(data):
        for n in range(2):
            sent[n] += senders[n].write(data[sent[n] :])
            arrived[n] += receivers[n].read(np.zeros(len(data) - arrived[n] or 1, dtype=np.uint8))
        assert time.monotonic() - start < 20
    assert time.monotonic() - start >= 2 * len(data) / speed.bytes_per_s


def test_who_waits_for_a_busy_wire_is_told_when_to_try_again_also_once_that_is_past() -> None:
    sender, _ = _pair(Speed(latency_s=0.0, bytes_per_s=1e6))
    data = np.zeros(5000, dtype=np.uint8)
    assert sender.due() is None
    assert sender.write(data) == len(data)
    assert sender.due() is None
    assert sender.write(data) == 0
    again = sender.due()
    assert again is not None
    assert not sender.arm(to_write=True), "room in the link below does not free the wire"
    while time.monotonic() < again:
        time.sleep(1e-3)
    assert sender.due() == again
    assert sender.write(data) == len(data)


def test_what_has_not_left_does_not_count_as_written() -> None:
    here, there = memory_links(2, capacity=1 << 10)
    wires = Wires(memoryview(bytearray(16)), os.memfd_create("test-wires"))
    speed = Speed(latency_s=0.0, bytes_per_s=1e9)
    sender, receiver = EmulatedLink(here[1], speed, wires, 0), EmulatedLink(there[0], speed, wires, 1)
    data, got = np.arange(3000).astype(np.uint8), np.zeros(3000, dtype=np.uint8)
    assert sender.write(data) == 0
    arrived, sent = 0, 0
    while arrived < 2000:
        arrived += receiver.read(got[arrived:])
        sent += sender.write(data[sent:])
    assert sent == len(data)
    while arrived < len(data):
        arrived += receiver.read(got[arrived:])
    assert (got == data).all()


def test_frames_between_hosts_have_headers() -> None:
    """Ranks of one host have no frames between them, and a link of their own."""
    took = []
    for wire in (None, 0):
        here, there = memory_links(2, capacity=1 << 20)
        wires = Wires(memoryview(bytearray(16)), os.memfd_create("test-wires"))
        sender = EmulatedLink(here[1], Speed(latency_s=0.0, bytes_per_s=1e5), wires, wire)
        receiver = EmulatedLink(there[0], Speed(latency_s=0.0, bytes_per_s=1e5), wires, wire)
        start = time.monotonic()
        assert sender.write(np.zeros(14_480, dtype=np.uint8)) == 14_480
        receiver.window(1)
        arrives = receiver.due()
        assert arrives is not None
        took.append(arrives - start)
    assert took[0] == pytest.approx(0.1448, abs=0.003)
    assert took[1] == pytest.approx(0.1514, abs=0.003)


def test_the_choice_of_an_algorithm_follows_the_links() -> None:
    slow_between = network_like(parse_emulation("4x4, 10us, 20GB/s | 100us, 1Gb/s"))
    assert choose_all_reduce(64 << 20, 16, 4, slow_between) == "hierarchical"
    far = network_like(parse_emulation("8x1, 10us, 20GB/s | 50ms, 10Gb/s"))
    assert choose_all_reduce(4096, 8, 1, far) == "butterfly"
