"""What the tests of resharding run on real ranks, in float64: the first half of a run, saved; and the second half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distributed.proofs import Proof
from shoal.checkpoint.restore import restore
from shoal.checkpoint.save import open_checkpoint, save
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.proof.compare import compare
from shoal.proof.conditions import Conditions, for_proof
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse


def _ready(me: Any, spec: str, strategy: str) -> Prepared:
    job = for_proof(load_job(spec))
    return prepare(job, parse(strategy), rank=me.rank, backend=me.backend, dtype=torch.float64)


def _steps(ready: Prepared, first: int, stop: int, counter: int) -> tuple[list[float], int]:
    losses = []
    with Conditions()():
        for step in range(first, stop):
            losses.append(ready.runner.step(step, counter).loss)
            counter = ready.runner.order.next(counter)
    return losses, counter


def save_many(arguments: dict[str, Any], channel: Any) -> list[list[float]]:
    """For each (job, strategy, folder): so many steps and a checkpoint. Gives the losses."""
    me, steps, found = join(), arguments["steps"], []
    for spec, strategy, folder in arguments["cases"]:
        ready = _ready(me, spec, strategy)
        losses, counter = _steps(ready, 0, steps, 0)
        ready.executor.settle()
        save(Path(folder), ready.engine, step=steps, progress={"counter": counter})
        ready.engine.close()
        found.append(losses)
    leave()
    return found


def resume_many(arguments: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """For each (job, strategy, checkpoint, serial run): the rest of the steps, and how far from the latter they end."""
    me, found = join(), []
    for spec, strategy, path, reference in arguments["cases"]:
        ready = _ready(me, spec, strategy)
        checkpoint = open_checkpoint(Path(path))
        restore(ready.engine, checkpoint)
        losses, _ = _steps(ready, checkpoint.step, arguments["steps"], checkpoint.progress["counter"])
        compared = compare(ready, reference)
        ready.engine.close()
        found.append({"losses": losses, "worst": compared["worst"][:1], "compared": compared["compared"]})
    leave()
    return found


def serial_many(arguments: dict[str, Any], channel: Any) -> list[str]:
    """The undisturbed run of each (job, strategy) by plain PyTorch, left behind as files; their paths."""
    paths = []
    for spec, strategy in arguments["cases"]:
        proof = Proof(
            spec=spec,
            job=load_job(spec),
            strategy=parse(strategy),
            steps=arguments["steps"],
            folder=Path(arguments["folder"]),
        )
        if not proof.path.with_suffix(".json").exists():
            proof.train_serially()
        paths.append(str(proof.path))
    return paths
