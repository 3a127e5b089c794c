"""Who updates and who waits under each rule of a parameter server, in random schedules in one thread."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from shoal.parallel.server.coordinator import Answer, Coordinator, Dropped, Update
from shoal.strategy.terms import asp, bsp, softsync, ssp
from shoal.strategy.terms.serving import Clocks, Push
from shoal.strategy.terms.sync import Served

STEPS = 23


class Simulated:
    """Workers of different speeds under a coordinator; what it decided."""

    def __init__(
        self, rule: Served, speeds: list[float], seed: int, *, killed: tuple[int, float] | None = None
    ) -> None:
        self.coordinator = Coordinator(rule, len(speeds))
        self.updates: list[Update] = []
        self.dropped: list[Push] = []
        self.paused: list[int] = []
        self.at: dict[int, tuple[tuple[int, int], int]] = {}
        self.due: dict[int, float] = {}
        self.speeds, self.random, self.now = speeds, random.Random(seed), 0.0
        alive = set(range(len(speeds)))
        for worker in alive:
            self.coordinator.ask(worker, STEPS)
        self._act()
        while self.due:
            if killed is not None and min(self.due.values()) > killed[1] and killed[0] in alive:
                alive.discard(killed[0])
                self.due.pop(killed[0], None)
                self.coordinator.lose(killed[0])
                self._act()
                continue
            worker = min(self.due, key=lambda each: self.due[each])
            self.now = self.due.pop(worker)
            (step, share), version = self.at[worker]
            self.dropped += [
                row.push for row in self.coordinator.push(Push(worker, step, share, version), now_s=self.now)
            ]
            self._act()
        assert set(self.paused) == alive
        assert not self.coordinator.waiting

    def _act(self) -> None:
        for action in self.coordinator.decide(self.now):
            if isinstance(action, Update):
                self.updates.append(action)
            elif isinstance(action, Dropped):
                self.dropped.append(action.push)
            elif action.ticket is None:
                self.paused.append(action.worker)
            else:
                self._start(action)

    def _start(self, answer: Answer) -> None:
        assert answer.ticket is not None
        self.at[answer.worker] = answer.ticket, self.coordinator.clocks.version
        self.due[answer.worker] = self.now + self.speeds[answer.worker] * self.random.uniform(0.5, 1.5)

    @property
    def tickets(self) -> Counter[tuple[int, int]]:
        return Counter((push.step, push.share) for update in self.updates for push in update.pushes)


EVERY_TICKET = Counter({(step, share): 1 for step in range(STEPS) for share in range(4)})
SLOW = [1.0, 1.0, 1.0, 5.0]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("s", [0, 1, 3, 10])
def test_ssp_never_runs_ahead_of_its_bound_under_a_straggler(s: int, seed: int) -> None:
    run = Simulated(ssp(s), SLOW, seed)
    assert max(run.coordinator.apart) == s if s < 10 else max(run.coordinator.apart) <= s
    assert max(run.coordinator.staleness) <= s
    assert run.tickets == EVERY_TICKET
    assert [len(update.pushes) for update in run.updates] == [4] * STEPS


def test_an_off_by_one_in_the_bound_is_seen_by_the_clocks_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(self: ssp, worker: int, clocks: Clocks) -> bool:
        return clocks.clocks[worker] - clocks.slowest <= self.s + 1

    monkeypatch.setattr(ssp, "may_read", one_more)
    for s in (0, 1, 3):
        assert max(Simulated(ssp(s), SLOW, 0).coordinator.apart) == s + 1


@pytest.mark.parametrize("seed", range(10))
def test_ssp_of_zero_updates_as_bsp(seed: int) -> None:
    one, other = Simulated(ssp(0), SLOW, seed), Simulated(bsp(), SLOW, seed)
    assert [update.pushes for update in one.updates] == [update.pushes for update in other.updates]
    assert set(one.coordinator.staleness) == {0}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rule", [asp(), softsync(1), softsync(2), softsync(3), softsync(4)], ids=str)
def test_every_ticket_is_learned_from_once_whatever_the_speeds(rule: Served, seed: int) -> None:
    run = Simulated(rule, SLOW, seed)
    assert run.tickets == EVERY_TICKET
    by_worker = Counter(push.worker for update in run.updates for push in update.pushes)
    assert by_worker[3] < by_worker[0]
    if isinstance(rule, softsync):
        assert max(run.coordinator.staleness) <= 2 * rule.k
    else:
        assert [len(update.pushes) for update in run.updates] == [1] * 4 * STEPS


@pytest.mark.parametrize("seed", range(10))
def test_backup_workers_do_not_wait_for_the_slowest(seed: int) -> None:
    run, all_of_them = Simulated(bsp(backup=1), SLOW, seed), Simulated(bsp(), SLOW, seed)
    assert [len(update.pushes) for update in run.updates] == [3] * STEPS
    assert run.dropped
    assert run.now < 0.5 * all_of_them.now
    for one, next_one in pairwise(run.updates):
        assert {push.step for push in next_one.pushes} == {one.pushes[0].step + 1}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rule", [asp(), softsync(2), ssp(3), bsp(backup=1)], ids=str)
def test_a_killed_worker_stops_no_other(rule: Served, seed: int) -> None:
    run = Simulated(rule, [*SLOW[:3], 2.0], seed, killed=(3, 3.1))
    if rule.by_tickets:
        assert run.tickets == EVERY_TICKET
    assert run.coordinator.clocks.members == {0, 1, 2}


def test_a_worker_that_is_given_up_on_may_come_back() -> None:
    there = Coordinator(asp(), 2)
    for worker in (0, 1):
        there.ask(worker, 3)
    first = [action for action in there.decide(0.0) if isinstance(action, Answer)]
    for number in range(3):
        there.push(Push(0, number, 0, number), now_s=number + 1.0)
        list(there.decide(number + 1.0))
    there._durations.extend([1.0] * 8)
    assert there.late(9.0) == []
    assert 1 in there.late(20.0)
    there.lose(1)
    late = there.push(Push(1, *first[1].ticket, 0), now_s=21.0)  # type: ignore[misc]
    assert [row.push.worker for row in late] == [1]
    assert there.clocks.members == {0, 1}


def test_a_stop_ends_with_the_steps_that_have_begun() -> None:
    there = Coordinator(asp(), 2)
    for worker in (0, 1):
        there.ask(worker, 100)
    list(there.decide())
    there.push(Push(0, 0, 0, 0), stop=True)
    assert [a for a in there.decide() if isinstance(a, Answer)] == []
    there.push(Push(1, 0, 1, 0))
    answers = [a for a in there.decide() if isinstance(a, Answer)]
    assert [(a.worker, a.ticket, a.step, a.stop) for a in answers] == [(0, None, 1, True), (1, None, 1, True)]
