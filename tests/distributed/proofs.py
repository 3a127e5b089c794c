"""Many proofs on ranks that are started once: what `verify` does, for a list of jobs and strategies.

Starting ranks costs more than training a model of fifty parameters, so sweeps over odd models run here; the
comparison is that of `shoal.proof.certify`, function for function. Serial runs are shared among the ranks, and
with `references` (a folder) among calls as well: each is made once.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.job import Job, load_job
from shoal.launch.join import join, leave
from shoal.parallel.batch_norm import batch_norms
from shoal.parallel.runnable import NotRunnable
from shoal.proof.compare import compare
from shoal.proof.conditions import for_proof
from shoal.proof.entry import serial_run
from shoal.proof.runs import train_steps
from shoal.runtime.setup import prepare
from shoal.strategy import Strategy, contract, parse

JOBS = str(Path(__file__).parent / "jobs" / "odd.py")
CROSSING = str(Path(__file__).parent / "jobs" / "crossing.py")


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One job under one strategy, and the serial run it is held to."""

    spec: str
    job: Job
    strategy: Strategy
    steps: int
    folder: Path

    @property
    def asked(self) -> dict[str, Any]:
        """What `serial_run` needs to know; proofs for which this is equal share a serial run."""
        normed = bool(batch_norms(self.job.model()))
        # Some odd models count their calls.
        couples = normed or self.spec.startswith((JOBS, CROSSING))
        # Where samples do not see each other, any cut into micro-batches gives the same sums.
        micro_batches = self.strategy.micro_batches if couples else 1
        return {
            "job": self.spec,
            "strategy": "serial",
            "num_steps": self.steps,
            "exact": True,
            "micro_batches": micro_batches,
            "disturbances": int(normed),
            "reverse": False,
        }

    @property
    def path(self) -> Path:
        name = hashlib.sha256(json.dumps(self.asked, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"{name}.safetensors"

    def train_serially(self) -> None:
        """Leaves the serial run behind as files, the last of which says that all are there."""
        partial = self.path.with_suffix(f".{os.getpid()}")
        told = serial_run({**self.asked, "reference": str(partial)}, None)
        partial.rename(self.path)
        self.path.with_suffix(".json").write_text(json.dumps(told))


def prove_many(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """One row for each (job, strategy): the largest difference and what the ledger says, on this rank."""
    me = join()
    jobs: dict[str, Job] = {}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(_from_rank_0(arguments.get("references") or own))
        proofs = []
        for name, text in arguments["cases"]:
            spec = name if ":" in name else f"{JOBS}:{name}"
            jobs.setdefault(spec, load_job(spec))
            proofs.append(
                Proof(spec=spec, job=jobs[spec], strategy=parse(text), steps=arguments["steps"], folder=folder)
            )
        missing = {proof.path: proof for proof in proofs if not proof.path.with_suffix(".json").exists()}
        _barrier()
        for proof in [*missing.values()][me.rank :: me.world]:
            proof.train_serially()
        _barrier()
        rows = []
        for (name, text), proof in zip(arguments["cases"], proofs, strict=True):
            case = f"{name} under {text}"
            try:
                rows.append({"case": case} | _prove(me, proof))
            except Exception as error:
                raise RuntimeError(f"{case}: {type(error).__name__}: {error}") from error
        _barrier()
    leave()
    return rows


def _from_rank_0(value: str) -> str:
    everyone = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(everyone, src=0)
    return everyone[0]


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _prove(me: Any, proof: Proof) -> dict[str, Any]:
    assert contract(proof.strategy).kind == "exact"
    serial = json.loads(proof.path.with_suffix(".json").read_text())
    try:
        ready = prepare(
            for_proof(proof.job),
            proof.strategy,
            rank=me.rank,
            backend=me.backend,
            device=me.device,
            dtype=torch.float64,
        )
    except NotRunnable as error:
        return {"refused": str(error)}
    trained = train_steps(ready, proof.steps)
    compared = compare(ready, str(proof.path))
    ready.engine.close()
    apart = [abs(a - b) / abs(b) for a, b in zip(trained["losses"], serial["losses"], strict=True)]
    worst = [*compared["worst"], *((d, f"loss of step {n + 1}") for n, d in enumerate(apart))]
    difference, where = max(worst, key=lambda row: (row[0] != row[0], row[0]))
    return {
        "difference": difference,
        "where": where,
        "ledger": trained["ledger_differences"],
        "compared": compared["compared"],
        "elements": serial["elements"],
        "losses": trained["losses"],
        "backend": me.backend,
    }
