"""How long a rank spins before it sleeps: only as long as that pays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shoal.comm import progress
from shoal.comm.peers import Peers, Steps
from shoal.comm.point_to_point import PointToPoint
from shoal.comm.progress import FULL_EVERY, LOOK_S, SPIN_S, Task, TaskQueue
from shoal.comm.transport.shared import SharedLink
from shoal.comm.vector import Vector

ONE = Vector(torch.ones(1))
LATE_S = 0.005


@pytest.fixture
def line(links: tuple[SharedLink, SharedLink], monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskQueue]:
    monkeypatch.setattr(progress, "may_spin", lambda: True)
    line = TaskQueue([links[0]], "a test")
    yield line
    line.close()


def _wait_for_one(line: TaskQueue, peers: list[Peers], *, late_s: float) -> None:
    """A message that comes so much later than it is waited for."""
    here, there = (each.begin("broadcast") for each in peers)

    def steps() -> Steps:
        yield from here.finish(here.receive(1, Vector(torch.empty(1))))

    def later() -> None:
        time.sleep(late_s)
        there.send(0, ONE)

    sender = threading.Thread(target=later)
    if late_s:
        sender.start()
    task = line.submit(Task(steps(), "a message"), background=False)
    if not late_s:
        there.send(0, ONE)
    line.wait(task, 10.0)
    if late_s:
        sender.join()


def test_spinning_in_vain_becomes_rare_and_comes_back_where_it_pays(line: TaskQueue, peers: list[Peers]) -> None:
    moments = [line.spin_s]
    while len(moments) < FULL_EVERY:
        _wait_for_one(line, peers, late_s=LATE_S)
        moments.append(line.spin_s)
    assert max(moments) == SPIN_S
    assert sum(moments) < len(moments) * SPIN_S / 4
    _wait_for_one(line, peers, late_s=0.0)
    assert line.spin_s == SPIN_S


def test_a_late_message_is_slept_for(line: TaskQueue, peers: list[Peers]) -> None:
    """Not spun for: the processor is free for whoever is late."""
    _wait_for_one(line, peers, late_s=LATE_S)
    start = time.thread_time()
    for _ in range(10):
        _wait_for_one(line, peers, late_s=LATE_S)
    assert time.thread_time() - start < 10 * LATE_S / 3


@pytest.mark.parametrize("spin", [False, True])
def test_a_message_that_has_come_is_not_slept_on_while_another_is_expected(
    links: tuple[SharedLink, SharedLink], monkeypatch: pytest.MonkeyPatch, spin: bool
) -> None:
    """As in a pipeline: the next micro-batch's receive is under way while this one's is waited for."""
    monkeypatch.setattr(progress, "may_spin", lambda: spin)
    here, there = PointToPoint({1: links[0]}, "here"), PointToPoint({0: links[1]}, "there")
    try:
        for turn in range(4):
            here.receive(1, 100 + turn, Vector(torch.empty(1)), background=True)
            waited = here.receive(1, turn, Vector(torch.empty(1)), background=True)
            sender = threading.Timer(3 * LATE_S, lambda: there.send(0, turn, ONE, background=True))
            sender.start()
            start = time.monotonic()
            here.wait(waited, 10.0)
            sender.join()
            assert time.monotonic() - start < LOOK_S / 2
    finally:
        here.close()
        there.close()
