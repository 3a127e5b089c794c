"""A replica that runs at its own speed in the training loop: tickets until all stand at one step, and the end.

A worker of parameter servers, or an island, computes the tickets that it is given until a *limit*, the next step at
which all evaluate, save or end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.job import Job
from shoal.launch.devices import peak_memory_bytes
from shoal.launch.join import Rank
from shoal.launch.watch import beat
from shoal.parallel.engine import Engine
from shoal.parallel.server.remote import RemoteOptimizer
from shoal.parallel.shared_tickets import SharedTickets
from shoal.parallel.sync.tickets import IslandTickets
from shoal.runtime.servers import serve_here
from shoal.strategy import Strategy
from shoal.training.hindered import Hindered
from shoal.training.pace import Pace


def next_limit(step: int, steps: int, *every: int) -> int:
    """The step at which replicas under servers stand together next, after `step`: the next that is due to be evaluated
    or saved, or the end."""
    return min([steps, *((step // each + 1) * each for each in every if each)])


@dataclass
class Counters:
    """The sample counter at which each step begins, from a known one on. Tickets may come in any order."""

    after: Callable[[int], int]
    """The counter of the step that follows the one at a counter."""
    known: dict[int, int]

    def at(self, step: int) -> int:
        last = max(self.known)
        while last < step:
            self.known[last + 1] = self.after(self.known[last])
            last += 1
        return self.known[step]


def next_meeting(pace: Pace, step: int, steps: int, *every: int) -> int:
    """The same for islands, which meet at an exchange."""
    at = step
    while at < steps:
        at = min(steps, (at // pace.period + 1) * pace.period)
        if any(pace.due(at, each) for each in every):
            break
    return at


def run_tickets(
    run: Any, remote: RemoteOptimizer | SharedTickets | IslandTickets, one_step: Callable[[], None], limit: int
) -> None:
    """Computes tickets up to the next limit. `run` is the TrainingRun, whose step and counter are those of the
    ticket."""
    counters = Counters(run.runner.order.next, {run.step: run.counter})
    remote.ask(limit)
    while not remote.paused:
        run.step, run.counter = remote.step, counters.at(remote.step)
        run.runner.share = remote.share if remote.by_tickets else None
        one_step()
    run.step, run.counter, run.stopping = remote.step, counters.at(remote.step), remote.stopping
    run.engine.clock = run.step


def advance(run: Any, one_step: Callable[[], None], every: int) -> None:
    """One step of a run; where replicas run at their own speed, tickets until all stand at one step again. `every`:
    steps from one checkpoint to the next."""
    tickets, outer = run.engine.owner.tickets, run.engine.outer
    step, steps, evaluate_every = run.step, run.job.steps, run.job.evaluate_every or 0
    if outer is not None and outer.tickets is not None:
        outer.tickets.begin(step)
        run_tickets(run, outer.tickets, one_step, next_meeting(run.pace, step, steps, evaluate_every, every))
    elif tickets is None or tickets.together:
        one_step()
    else:
        run_tickets(run, tickets, one_step, next_limit(step, steps, evaluate_every, every))


def serve_rank(job: Job, strategy: Strategy, me: Rank, hindered: Hindered) -> dict[str, Any]:
    """The work of a rank that only serves; what it sent and held."""
    served = serve_here(
        job, strategy, rank=me.rank, backend=me.backend, watch=beat, at_step=lambda step: hindered.at_step(step + 1)
    )
    return {**served, "memory_bytes": peak_memory_bytes(me.device)}


def leave_servers(engine: Engine, rank: int) -> dict[str, Any]:
    """Takes leave of parameter servers, if there are some; what they have counted, on rank 0. Replicas that update one
    memory have counted it there."""
    remote, tickets = engine.owner.remote, engine.owner.tickets
    if tickets is None:
        return {}
    report = tickets.report() if rank == 0 else {}
    if report:
        report.pop("log", None)
        report.pop("dropped_log", None)
        for name, seen in (("staleness", "staleness"), ("ahead", "clocks_apart")):
            counted = Counter({int(key): times for key, times in report.pop(seen, {}).items()})
            setattr(engine.consistency, name, counted)
    if remote is not None:
        remote.close()
    return {"servers" if remote is not None else "hogwild": report} if report else {}
