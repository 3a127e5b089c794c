"""What the processes of the gate and of a proof are started with, named without loading torch."""

from __future__ import annotations

from typing import Any

from shoal.proof.options import ProofOptions
from shoal.runtime.options import JobOptions

MODULES = ("shoal.proof.examine", "shoal.proof.runs")
"""What they import, for `warm_up`."""


def gate_steps(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank, before training: two steps in float64, compared with serial ones."""
    from shoal.proof.one_step import on_own_ranks
    from shoal.runtime.setup import job_from

    job = job_from(JobOptions.from_json(arguments["job"]))
    return on_own_ranks(job, arguments["question"], arguments["backend"])


def examine(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In a process of its own: what a proof of this strategy can promise, and whether it may split batches."""
    from shoal.proof.examine import examined

    return examined(ProofOptions.from_json(arguments))


def serial_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In a process of its own: the serial run, left behind as a file of tensors."""
    from shoal.proof.runs import run_serially

    return run_serially(ProofOptions.from_json(arguments))


def parallel_run(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank: the run under the strategy, compared slice by slice."""
    from shoal.proof.runs import run_in_parallel

    return run_in_parallel(ProofOptions.from_json(arguments))
