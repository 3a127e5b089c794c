"""What the tests of parameter servers run on real ranks: workers and servers, in float64."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from distributed.proofs import JOBS, _barrier, _from_rank_0
from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import open_checkpoint, save
from shoal.comm.points import on_reach
from shoal.comm.transport import connect as connect_module
from shoal.job import load_job
from shoal.launch import sessions
from shoal.launch.join import join, leave
from shoal.parallel.owner.base import Owner
from shoal.parallel.server.codec import PushCodec
from shoal.parallel.server.coordinator import Coordinator, Update
from shoal.parallel.server.shard import ServedShard
from shoal.proof.compare import compare
from shoal.proof.conditions import Conditions, for_proof
from shoal.proof.entry import serial_run
from shoal.proof.options import ProofOptions
from shoal.proof.runs import train_steps
from shoal.proof.served import run_and_replay
from shoal.runtime.servers import is_server, serve_here
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse
from shoal.strategy.terms.serving import Push
from shoal.training.entry import train_run
from shoal.training.lost_islands import LostIslands


def _named(name: str) -> str:
    return name if name.endswith(".py") else f"{JOBS}:{name}"


def prove_served(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each (job, strategy, strategy of the serial run): the largest difference from it, and the ledger."""
    me, steps, rows = join(), arguments["steps"], []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_from_rank_0(own))
        for number, (name, text, judge) in enumerate(arguments["cases"]):
            path = folder / f"{number}.safetensors"
            if me.rank == 0:
                serial_run(
                    {
                        "job": _named(name),
                        "strategy": judge,
                        "reference": str(path),
                        "exact": True,
                        "num_steps": steps,
                        "micro_batches": arguments.get("micro_batches", 1),
                    },
                    None,
                )
            _barrier()
            job, strategy = for_proof(load_job(_named(name))), parse(text)
            if is_server(strategy, me.rank):
                serve_here(job, strategy, rank=me.rank, backend=me.backend, dtype=torch.float64)
                rows.append({"difference": 0.0, "where": "", "ledger": [], "compared": 0})
            else:
                ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
                trained = train_steps(ready, steps)
                ready.watched = None  # Gradients are averaged on the servers.
                ready.executor.settle()
                with ready.engine.consensus():
                    compared = compare(ready, str(path))
                report = ready.engine.owner.remote.report() if me.rank == 0 else {}  # type: ignore[union-attr]
                ready.close()
                difference, where = max(compared["worst"], default=(0.0, "nothing"))
                rows.append(
                    {
                        "difference": difference,
                        "where": where,
                        "ledger": trained["ledger_differences"],
                        "compared": sum(compared["compared"].values()),
                        "report": report,
                    }
                )
            _barrier()
    leave()
    return rows


def _prepared(me: Any, job: Any, strategy: Any) -> Prepared:
    return prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)


def replayed(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each (job, strategy): how far a run by tickets is from its replay, and what the servers counted."""
    me, rows = join(), []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_from_rank_0(own))
        for name, text in arguments["cases"]:
            job, strategy = for_proof(load_job(_named(name))), parse(text)
            options = ProofOptions(
                job=name,
                strategy=text,
                num_steps=arguments["steps"],
                exact=True,
                reference=str(folder / "none"),
            )
            if is_server(strategy, me.rank):
                serve_here(job, strategy, rank=me.rank, backend=me.backend, dtype=torch.float64)
                rows.append({"difference": 0.0, "compared": 0, "ledger": [], "losses": 0.0})
            else:
                report = run_and_replay(options, job, strategy, me)
                pairs = zip(report["losses"], report.get("serial_losses", report["losses"]), strict=True)
                rows.append(
                    {
                        "difference": max((row[0] for row in report["worst"]), default=0.0),
                        "compared": sum(report["compared"].values()),
                        "ledger": report["ledger_differences"],
                        "losses": max((abs(a - b) for a, b in pairs), default=0.0),
                    }
                )
            _barrier()
    leave()
    return rows


def off_by_one(arguments: dict[str, Any], channel: Any) -> Any:
    """The log says that gradients are one update older than they are."""
    right = Coordinator._update

    def update(self: Coordinator, pushes: list[Push]) -> Update:
        made = right(self, pushes)
        self.log[-1] = [[*row[:3], max(0, row[3] - 1), row[4]] for row in self.log[-1]]
        return made

    Coordinator._update = update  # type: ignore[method-assign]
    return replayed(arguments, channel)


def applied_twice(arguments: dict[str, Any], channel: Any) -> Any:
    """One gradient is applied a second time."""
    right = ServedShard.update
    times = [0]

    def update(self: ServedShard, *given: Any) -> None:
        times[0] += 1
        right(self, *given)
        if times[0] == 3:
            right(self, *given)

    ServedShard.update = update  # type: ignore[method-assign]
    return replayed(arguments, channel)


def never_pulled(arguments: dict[str, Any], channel: Any) -> Any:
    """The second shard always sends the parameters that it began with."""
    right = ServedShard.send
    first: dict[int, list[torch.Tensor]] = {}

    def send(self: ServedShard, worker: int) -> None:
        if self.index == 1:
            self._copies = first.setdefault(id(self), [part.master.clone() for part in self.parts])
        right(self, worker)

    ServedShard.send = send  # type: ignore[method-assign]
    return replayed(arguments, channel)


def forgets_the_rest(arguments: dict[str, Any], channel: Any) -> Any:
    """What a compressed push leaves is not kept for the next one."""
    right = PushCodec._encoded

    def encoded(self: PushCodec, each: Any, *given: Any) -> torch.Tensor:
        payload = right(self, each, *given)
        each.state.clear()
        return payload

    PushCodec._encoded = encoded  # type: ignore[method-assign]
    return replayed(arguments, channel)


def resumed_served(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A run without a break and one that is saved and taken up again under another strategy: parameters and state."""
    me, at, steps, folder = join(), arguments["at"], arguments["steps"], Path(arguments["folder"])
    job = for_proof(load_job(f"{JOBS}:{arguments['job']}"))
    found: dict[str, Any] = {}
    for name, text, first, stop in (
        ("unbroken", arguments["strategy"], 0, steps),
        ("saved", arguments["strategy"], 0, at),
        ("resumed", arguments["under"], at, steps),
    ):
        strategy = parse(text)
        if is_server(strategy, me.rank):
            serve_here(job, strategy, rank=me.rank, backend=me.backend, dtype=torch.float64)
        elif me.rank < strategy.workers:
            ready = _prepared(me, job, strategy)
            counter = 0
            if first:
                checkpoint = open_checkpoint(folder / f"step-{at:08}")
                restore(ready.engine, checkpoint)
                counter = checkpoint.progress["counter"]
            with Conditions()():
                for step in range(first, stop):
                    ready.runner.step(step, counter)
                    counter = ready.runner.order.next(counter)
            ready.executor.settle()
            if name == "saved":
                save(folder, ready.engine, step=at, progress={"counter": counter})
            values = {param_name: param.detach().clone() for param_name, param in ready.engine.model.named_parameters()}
            ready.close()
            found[name] = values
        _barrier()
    leave()
    if not found.keys() >= {"unbroken", "resumed"}:
        return {"difference": 0.0}
    pairs = [(found["unbroken"][name], found["resumed"][name]) for name in found["unbroken"]]
    return {"difference": max(float((one - other).abs().max()) for one, other in pairs)}


def forgets_state(arguments: dict[str, Any], channel: Any) -> Any:
    """The state of the servers is left out of the checkpoint."""
    Owner.gather_state = lambda self: None  # type: ignore[method-assign]
    return resumed_served(arguments, channel)


def killed_worker(arguments: dict[str, Any], channel: Any) -> Any:
    """A training run in which workers are killed or late: (rank, point, how often it is reached, seconds or None)."""
    for rank, point, times, late_s in arguments.pop("disturbed", ()):
        if rank == channel.rank and sessions.coming_since() is None:  # Once: not when it was started again.
            _disturb(point, times, late_s)
    return train_run(arguments, channel)


def killed_early(arguments: dict[str, Any], channel: Any) -> Any:
    """A worker is killed in its first ticket, while the first rank is still busy with its start."""
    right = LostIslands.allow

    def late(self: LostIslands) -> None:
        time.sleep(1.0 if channel.rank == 0 else 0.0)
        right(self)

    LostIslands.allow = late  # type: ignore[method-assign]
    return killed_worker(arguments, channel)


def _disturb(point: str, times: int, late_s: float | None) -> None:
    seen = [0]

    def arrived(at: str) -> None:
        seen[0] += at == point
        if at == point and late_s is not None:
            time.sleep(late_s)
        elif at == point and seen[0] == times:
            os.kill(os.getpid(), signal.SIGKILL)

    on_reach(arrived)


def among_strangers(arguments: dict[str, Any], channel: Any) -> Any:
    """`replayed`, where strangers find every port before the ranks do: half of them say nothing, the others anything.
    Adds what was refused, and whether a port is still open once training is over."""
    refused: list[str] = []
    ports: list[Any] = []
    strangers: list[socket.socket] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            refused.append(record.getMessage())

    logging.getLogger("shoal").addHandler(Kept(logging.WARNING))
    chance = random.Random(channel.rank)

    def visited(listen: Any) -> Any:
        def call() -> Any:
            listener = listen()
            ports.append((listener.family, listener.getsockname()))
            for number in range(arguments["strangers"]):
                stranger = socket.socket(listener.family, socket.SOCK_STREAM)
                stranger.connect(listener.getsockname())
                if number % 2:
                    stranger.sendall(chance.randbytes(chance.choice([60, 4096])))
                strangers.append(stranger)
            return listener

        return call

    for name in ("_listen_far", "_listen_nearby"):
        setattr(connect_module, name, visited(getattr(connect_module, name)))
    rows = replayed(arguments, channel)
    still_open = 0
    for family, place in ports:
        with socket.socket(family, socket.SOCK_STREAM) as late, contextlib.suppress(OSError):
            late.connect(place)
            still_open += 1
    return {"rows": rows, "refused": refused, "strangers": len(strangers), "open": still_open}
