"""The parallel run of a proof, where replicas run at their own speed under servers: trained, then replayed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from shoal.comm.compress.compressor import Compressor
from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.estimate.server_calls import pushed_parts
from shoal.job import Job
from shoal.parallel.shared_tickets import SharedTickets
from shoal.proof.compare import compare
from shoal.proof.conditions import Conditions
from shoal.proof.islands import Islands
from shoal.proof.options import ProofOptions
from shoal.proof.pushed import SimulatedPushes
from shoal.proof.replay_updates import ServerRule, replay
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import Strategy, none
from shoal.strategy.islands import is_loose
from shoal.strategy.seats import seats_of
from shoal.strategy.terms.sync import Served, hogwild

NOTHING: dict[str, Any] = {
    "losses": [],
    "ledger_differences": [],
    "ledger_compared": True,
    "predicted": [],
    "worst": [],
    "zero_gradient": [],
    "compared": {},
    "amplified": False,
    "replicated": [],
    "declared": {},
    "float32_drift": None,
}
"""The report of a rank that only serves."""


def run_and_replay(options: ProofOptions, job: Job, strategy: Strategy, me: Any) -> dict[str, Any]:
    """On every worker: trains by tickets; then the first one replays the log, and each compares what it holds."""
    ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
    report, mine = by_tickets(ready, options.num_steps)
    path = Path(options.reference).with_name("replayed.safetensors")
    serial: dict[str, Any] = {}
    remote = ready.engine.owner.remote
    assert remote is not None
    if me.rank == 0:
        serial = _replayed(options, job, strategy, remote.report(), path, mine, _simulated_pushes(ready))
    exchange({})  # The file is there.
    with ready.engine.consensus():
        report |= compare(ready, str(path))
    ready.close()
    return report | serial


def by_tickets(ready: Prepared, steps: int) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """Trains until all tickets are done. Losses, and how the ledger of each ticket differs from its prediction; and the
    tickets of this worker."""
    remote, runner = ready.engine.owner.tickets, ready.runner
    assert remote is not None
    starts, losses, unlike, tickets = [0], [], [], []
    while len(starts) <= steps:
        starts.append(runner.order.next(starts[-1]))
    remote.ask(steps)
    while not remote.paused:
        BOOK.take()
        step, runner.share = remote.step, remote.share if remote.by_tickets else None
        tickets.append((remote.replica, remote.step, remote.share))
        with Conditions()():
            losses.append(runner.step(step, starts[step]).loss)
        counted = BOOK.take().without("shapes")
        if len(losses) > 1:
            unlike += ready.differences(counted)
    return {
        "losses": losses,
        "ledger_differences": sorted(set(unlike)),
        "ledger_compared": True,
        "predicted": ready.predicted.to_json(),
        "float32_drift": None,
    }, tickets


def run_racing(options: ProofOptions, job: Job, strategy: Strategy, me: Any) -> dict[str, Any]:
    """On every rank, where replicas update one memory without locks. No other run has its numbers to the last digit,
    since updates interleave: the first rank repeats them one after the other, each with the gradient of the version
    that it began to read."""
    ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
    tickets = ready.engine.owner.tickets
    assert isinstance(tickets, SharedTickets)
    tickets.log = []
    report, _ = by_tickets(ready, options.num_steps)
    path = Path(options.reference).with_name("replayed.safetensors")
    logged = [[*row, loss] for row, loss in zip(tickets.log, report["losses"], strict=True)]
    rows = sorted(row for each in exchange({"rows": logged}) for row in each["rows"])
    serial: dict[str, Any] = {}
    if me.rank == 0:
        numbers = Counter[int]()
        log = []
        for _, worker, step, share, read, _ in rows:
            log.append([[worker, step, share, read, numbers[worker]]])
            numbers[worker] += 1
        order = [(worker, step, share) for _, worker, step, share, _, _ in rows]
        serial = _replayed(options, job, strategy, {"log": log, "dropped_log": []}, path, order, None, own_state=True)
    exchange({})  # The file is there.
    with ready.engine.consensus():
        compared = compare(ready, str(path))
    ready.close()
    return (
        NOTHING
        | report
        | compared
        | serial
        | {
            "losses": [row[-1] for row in rows],
            "tickets": [(row[2], row[3]) for row in rows],
        }
    )


def replays_pushes(strategy: Strategy) -> bool:
    """Whether a replay of the servers' log also repeats how workers compress: where each worker is one rank."""
    seats = seats_of(strategy)
    return seats is not None and (
        isinstance(strategy.dp_levels[0].compress, none) or (seats.positions == 1 and is_loose(strategy.dp_levels[0]))
    )


def _simulated_pushes(ready: Prepared) -> SimulatedPushes | None:
    term = ready.strategy.dp_levels[0].compress
    if not isinstance(term, Compressor) or not replays_pushes(ready.strategy):
        return None
    parts = list(pushed_parts(ready.expected.held, ready.table))
    return SimulatedPushes(parts, term, seed=ready.job.seed, clip=ready.job.clip)


def _replayed(
    options: ProofOptions,
    job: Job,
    strategy: Strategy,
    report: Any,
    path: Path,
    mine: list[tuple[int, int, int]],
    sends: SimulatedPushes | None,
    *,
    own_state: bool = False,
) -> dict[str, Any]:
    from shoal.proof.runs import left_behind

    log = report["log"]
    rule, workers = strategy.dp_levels[0].sync, strategy.dp_levels[0].n
    assert isinstance(rule, Served | hogwild)

    def unused(*given: Any) -> None:
        raise AssertionError

    shares = Islands(
        num=workers,
        every=1,
        replicas=strategy.replicas,
        micro_batches=strategy.micro_batches,
        exchange=unused,
        begin=unused,
    )
    server_rule = ServerRule(lambda staleness: 1.0, 0.0)
    if isinstance(rule, Served):
        server_rule = ServerRule(rule.rate, rule.compensation)
    reference, losses = replay(
        job,
        log,
        shares,
        server_rule,
        parts=options.parts,
        separate=options.micro_batches > 1,
        conditions=Conditions(),
        dropped=report["dropped_log"],
        sends=sends,
        own_state=own_state,
    )
    left_behind(reference, str(path))
    ages = [version - read for version, pushes in enumerate(log) for _, _, _, read, _ in pushes]
    return {
        "serial_losses": [losses.get(ticket, float("nan")) for ticket in mine],
        "described": f"one process, plain PyTorch, float64: the {len(log)} updates of this run repeated from its "
        f"log, each of {len(ages)} gradients at the version it was computed with (age up to {max(ages)})",
    }
