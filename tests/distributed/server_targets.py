"""What the tests of parameter servers run on real ranks: workers and servers, in float64."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from distributed.proofs import JOBS, _barrier, _from_rank_0
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.proof.compare import compare
from shoal.proof.conditions import for_proof
from shoal.proof.entry import serial_run
from shoal.proof.runs import train_steps
from shoal.runtime.servers import is_server, serve_here
from shoal.runtime.setup import prepare
from shoal.strategy import parse


def prove_served(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each (job, strategy, strategy of the serial run): the largest difference from it, and the ledger."""
    me, steps, rows = join(), arguments["steps"], []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_from_rank_0(own))
        for number, (name, text, judge) in enumerate(arguments["cases"]):
            path = folder / f"{number}.safetensors"
            if me.rank == 0:
                serial_run(
                    {"job": f"{JOBS}:{name}", "strategy": judge, "reference": str(path), "exact": True,
                     "num_steps": steps, "micro_batches": arguments.get("micro_batches", 1)}, None,
                )  # fmt: skip
            _barrier()
            job, strategy = for_proof(load_job(f"{JOBS}:{name}")), parse(text)
            if is_server(strategy, me.rank):
                serve_here(job, strategy, rank=me.rank, backend=me.backend, dtype=torch.float64)
                rows.append({"difference": 0.0, "where": "", "ledger": [], "compared": 0})
            else:
                ready = prepare(
                    job, strategy, rank=me.rank, backend=me.backend, device=me.device, dtype=torch.float64
                )
                trained = train_steps(ready, steps)
                ready.watched = None  # Gradients are averaged on the servers.
                ready.executor.settle()
                with ready.engine.consensus():
                    compared = compare(ready, str(path))
                report = ready.engine.owner.remote.report() if me.rank == 0 else {}  # type: ignore[union-attr]
                ready.close()
                difference, where = max(compared["worst"], default=(0.0, "nothing"))
                rows.append({"difference": difference, "where": where, "ledger": trained["ledger_differences"],
                             "compared": sum(compared["compared"].values()), "report": report})  # fmt: skip
            _barrier()
    leave()
    return rows
