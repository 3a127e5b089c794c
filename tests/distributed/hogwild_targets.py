"""What the tests of HOGWILD run on real ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from distributed.proofs import JOBS, _barrier, _from_rank_0
from shoal.checkpoint.opening import open_checkpoint
from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import save
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.parallel.owner.hogwild import HogwildOwner
from shoal.parallel.shared_tickets import SharedTickets
from shoal.proof.conditions import for_proof
from shoal.proof.options import ProofOptions
from shoal.proof.served import run_racing
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse

counted: dict[str, Any] = {}


def _keep_counts() -> None:
    close = SharedTickets.close

    def closed(self: SharedTickets) -> None:
        counted["staleness"] = self.report()["staleness"]
        close(self)

    SharedTickets.close = closed  # type: ignore[method-assign]


def raced(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each job: how far losses are from the updates repeated one by one, the tickets, and the ages of gradients."""
    me, rows = join(), []
    _keep_counts()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_from_rank_0(own))
        for name in arguments["jobs"]:
            options = ProofOptions(
                job=name,
                strategy=arguments["strategy"],
                num_steps=arguments["steps"],
                exact=False,
                reference=str(folder / "none"),
            )
            report = run_racing(options, for_proof(load_job(f"{JOBS}:{name}")), parse(arguments["strategy"]), me)
            if me.rank == 0:
                pairs = list(zip(report["losses"], report["serial_losses"], strict=True))
                rows.append(
                    {
                        "losses": sum(abs(a - b) / abs(b) for a, b in pairs) / len(pairs),
                        "tickets": report["tickets"],
                        "ledger": report["ledger_differences"],
                        "staleness": counted["staleness"],
                    }
                )
            _barrier()
    leave()
    return rows


def raced_in_private(arguments: dict[str, Any], channel: Any) -> Any:
    """Each replica updates memory of its own."""
    HogwildOwner._room = lambda self, count, dtype: torch.zeros(count, dtype=dtype)  # type: ignore[method-assign]
    arguments["jobs"] = ["momentum"]
    return raced(arguments, channel)


def resumed_alone(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Replicas take turns, so that the order is known: a run without a break beside one that is saved and resumed."""
    me, at, steps, folder = join(), arguments["at"], arguments["steps"], Path(arguments["folder"])
    job, strategy = for_proof(load_job(f"{JOBS}:{arguments['job']}")), parse(arguments["strategy"])
    found = {}
    for name, first, stop in (("unbroken", 0, steps), ("saved", 0, at), ("resumed", at, steps)):
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64)
        if first:
            restore(ready.engine, open_checkpoint(folder / f"step-{at:08}"))
        _by_turns(ready, me.rank, first, stop)
        if name == "saved":
            save(folder, ready.engine, step=at, progress={})
        found[name] = {key: param.detach().clone() for key, param in ready.engine.model.named_parameters()}
        ready.close()
        _barrier()
    leave()
    pairs = [(found["unbroken"][key], found["resumed"][key]) for key in found["unbroken"]]
    return {"difference": max(float((one - other).abs().max()) for one, other in pairs)}


def _by_turns(ready: Prepared, rank: int, first: int, stop: int) -> None:
    """Each replica computes its own share of every step, one after the other."""
    ready.engine.owner.tickets.finish = lambda: 0  # type: ignore[union-attr, method-assign]
    starts = [0]
    while len(starts) <= stop:
        starts.append(ready.runner.order.next(starts[-1]))
    for step in range(first, stop):
        for turn in range(2):
            if turn == rank:
                ready.runner.share = rank
                ready.runner.step(step, starts[step])
            _barrier()
