"""Many proofs on ranks that are started once: what `verify` does, for a list of jobs and strategies.

Starting ranks costs more than training a model of fifty parameters, so sweeps over odd models run here; the
comparison is that of `shoal.train.verify.certify`, function for function.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from shoal.parallel.runnable import NotRunnable
from shoal.strategy import contract, parse
from shoal.train.launch.join import join, leave
from shoal.train.setup import job_from, prepare
from shoal.train.verify.certify import _train, compare, serial_run
from shoal.train.verify.float64 import KeepFloat64

JOBS = str(Path(__file__).parent / "jobs" / "odd.py")


def prove_many(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """One row for each (job, strategy): the largest difference and what the ledger says, on this rank."""
    me = join()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for job_spec, text in arguments["cases"]:
            rows.append({"case": f"{job_spec} under {text}"} | _prove(me, job_spec, text, folder, arguments["steps"]))
    leave()
    return rows


def _prove(me: Any, job_spec: str, text: str, folder: str, steps: int) -> dict[str, Any]:
    strategy = parse(text)
    spec = job_spec if ":" in job_spec else f"{JOBS}:{job_spec}"
    path = str(Path(folder) / "reference.safetensors")
    job = job_from({"job": spec})
    dropping = any(isinstance(m, torch.nn.Dropout) for m in job.model().modules())
    asked = {
        "job": spec, "strategy": text, "steps_to_verify": steps, "exact": True, "reference": path,
        "parts": strategy.data_parallel if dropping else 1,
    }  # fmt: skip
    assert contract(strategy).kind == "exact"
    serial = serial_run(asked, None)
    try:
        ready = prepare(job, strategy, rank=me.rank, backend=me.backend, dtype=torch.float64)
    except NotRunnable as error:
        return {"refused": str(error)}
    with KeepFloat64():
        trained = _train(ready, steps)
    compared = compare(ready, path)
    ready.engine.close()
    apart = [abs(a - b) / abs(b) for a, b in zip(trained["losses"], serial["losses"], strict=True)]
    worst = [*compared["worst"], *((d, f"loss of step {n + 1}") for n, d in enumerate(apart))]
    difference, where = max(worst, key=lambda row: (row[0] != row[0], row[0]))
    return {
        "difference": difference, "where": where, "ledger": trained["ledger_differences"],
        "compared": compared["compared"], "elements": serial["elements"], "losses": trained["losses"],
    }  # fmt: skip
