"""Steps of workers under parameter servers, event by event: who waits for whom, and how stale gradients are.

The rules of the levels decide (`strategy/terms/sync.py`), as they do in a run (`parallel/server/coordinator.py`); here
computing and sending only take time. A push leaves a worker by its own link and enters the servers by theirs, one after
the other; a pull goes the other way. An update holds the servers up for as long as it takes.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.strategy.terms.serving import Clocks, Push
from shoal.strategy.terms.sync import Served

WARM_UP = 3
"""Steps at the start that are not counted: all workers begin together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCosts:
    """What a step consists of, in seconds."""

    ticket_s: Sequence[float]
    """Of each worker: its share of one batch."""
    push_s: float
    """A gradient through a worker's link."""
    pull_s: float
    """Parameters through it."""
    shards: int
    """A server's link carries a shard of each push and pull, and is as fast as a worker's."""
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedSteps:
    """What was simulated."""

    step_s: float
    """Seconds of one step: an update, or as many tickets as there are workers, where data is handed out by tickets."""
    waiting: float
    """The part of the workers' time in which they may not go on, the mean over workers."""
    dropped: float
    """The part of the gradients that came too late."""
    used: float = 1.0
    """The part of a batch that a step learns from."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Updates between the read of the parameters and the use of the gradient."""
    ahead: Counter[int] = field(default_factory=Counter)
    """Steps that a worker was ahead of the slowest when it read."""
    a_step: float = 1.0
    """Updates in a step."""

    @property
    def staleness_mean(self) -> float:
        return sum(age * times for age, times in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def stale_steps(self) -> float:
        """The mean staleness in steps: n updates of one worker each make one."""
        return self.staleness_mean / self.a_step


def simulate_servers(
    rule: Served,
    costs: ServerCosts,
    *,
    steps: int = 50,
    slower: Callable[[int, int], float] = lambda w, ticket: 1.0,
    noise: float = 0.0,
    seed: int = 0,
) -> ServedSteps:
    """Args:
    rule: Of the level.
    costs: What takes how long.
    steps: Steps to simulate, beyond the first few.
    slower: How much longer a worker computes its ticket of a number.
    noise: A ticket takes 1 + noise |z| times as long, z normal.
    seed: Of the noise.
    """
    return _Servers(rule, costs, slower, noise, seed).run(steps)


class _Servers:
    def __init__(
        self, rule: Served, costs: ServerCosts, slower: Callable[[int, int], float], noise: float, seed: int
    ) -> None:
        self.rule, self.costs, self.slower, self.noise = rule, costs, slower, noise
        self.workers = len(costs.ticket_s)
        everyone = range(self.workers)
        self.clocks = Clocks(self.workers, 0, set(everyone), dict.fromkeys(everyone, 0))
        self.random = random.Random(seed)
        self.waiting: list[Push] = []
        self.asking = dict.fromkeys(everyone, 0.0)
        """Workers that want to go on, and since when."""
        self.coming: list[tuple[float, int, bool, Push]] = []
        """What happens when: a worker has computed a gradient, or it has arrived (True)."""
        self.into_s = self.out_s = self.busy_s = 0.0
        """When the servers' links and the servers themselves are free."""
        self.tickets = Counter[int]()
        self.next = self.used = self.dropped = 0
        self.waited_s, self.now_s = 0.0, 0.0
        self.staleness, self.ahead = Counter[int](), Counter[int]()

    def run(self, steps: int) -> ServedSteps:
        self._until(WARM_UP * self.workers)
        begun_s, begun, updates = self.now_s, self.used, self.clocks.version
        self.waited_s, self.dropped, self.staleness, self.ahead = 0.0, 0, Counter(), Counter()
        self._until(begun + steps * self.workers)
        took_s, used, updates = self.now_s - begun_s, self.used - begun, self.clocks.version - updates
        made = used / self.workers if self.rule.by_tickets else updates
        return ServedSteps(
            step_s=took_s / made,
            waiting=min(1.0, self.waited_s / (took_s * self.workers)),
            dropped=self.dropped / (self.dropped + used),
            used=used / self.workers / made,
            staleness=self.staleness,
            ahead=self.ahead,
            a_step=updates / made,
        )

    def _until(self, used: int) -> None:
        self._decide()
        while self.used < used:
            self.now_s, worker, arrived, push = heapq.heappop(self.coming)
            if not arrived:
                self.into_s = max(self.now_s, self.into_s) + self.costs.push_s / self.costs.shards
                arrives_s = max(self.now_s + self.costs.push_s, self.into_s)
                heapq.heappush(self.coming, (arrives_s, worker, True, push))
                continue
            self.clocks.reading.pop(push.worker, None)
            self.clocks.clocks[push.worker] = push.step + 1
            self.waiting.append(push)
            self.asking[push.worker] = self.now_s
            self._decide()

    def _decide(self) -> None:
        while True:
            chosen = self.rule.choose(self.waiting, self.clocks)
            for push in chosen.drop:
                self.waiting.remove(push)
                self.clocks.clocks[push.worker] = max(self.clocks.clocks[push.worker], self.clocks.version)
                self.dropped += 1
            if chosen.apply:
                self._update(list(chosen.apply))
            elif not chosen.drop:
                break
        for worker in sorted(self.asking):
            mine = self.clocks.clocks[worker]
            if not self.rule.by_tickets:
                mine = self.clocks.clocks[worker] = max(mine, self.clocks.version)
            if self.rule.may_read(worker, self.clocks):
                self._start(worker, mine)

    def _update(self, pushes: list[Push]) -> None:
        self.staleness.update(self.clocks.version - push.version for push in pushes)
        self.waiting = [push for push in self.waiting if push not in pushes]
        self.used += len(pushes)
        self.clocks.version += 1
        self.busy_s = max(self.now_s, self.busy_s) + self.costs.update_s

    def _start(self, worker: int, mine: int) -> None:
        costs, number = self.costs, self.tickets[worker]
        self.tickets[worker] += 1
        self.waited_s += self.now_s - self.asking.pop(worker)
        if self.rule.by_tickets:
            mine, self.next = self.next // self.workers, self.next + 1
        else:
            self.ahead[mine - self.clocks.slowest] += 1
        self.clocks.reading[worker] = self.clocks.version
        ready_s = max(self.now_s, self.busy_s)
        self.out_s = max(ready_s, self.out_s) + costs.pull_s / costs.shards
        computing_s = costs.ticket_s[worker] * self.slower(worker, number)
        computing_s *= 1 + self.noise * abs(self.random.gauss(0.0, 1.0))
        done_s = max(ready_s + costs.pull_s, self.out_s) + computing_s
        push = Push(worker, mine, worker, self.clocks.version, number)
        heapq.heappush(self.coming, (done_s, worker, False, push))
