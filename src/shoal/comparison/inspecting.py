"""What the protocol has to know of a job before it is trained: its size and work, who cannot take part and why, the
peak of this machine, and what the plan predicts. In one process, as the target of `run_ranks`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from shoal.comparison.adapters import adapter_of
from shoal.comparison.rank import job_of
from shoal.job import Job
from shoal.layout.layout import facts_of, layout_of
from shoal.parallel.runnable import cannot_run
from shoal.strategy import ModelFacts, parse
from shoal.strategy.legality.check import check
from shoal.training.record.recorder import environment


def inspect(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In one process: what the protocol has to know of a job, and which contestants cannot take part, with reasons."""
    from torch.utils.flop_counter import FlopCounterMode

    from shoal.parallel.batch_norm import batch_norms
    from shoal.runtime.step import build_model

    job = job_of(settings)
    model = build_model(job)
    batch = job.train.batch(job.order().indices(0)[: max(2, job.global_batch // 4)])
    samples = len(next(iter(batch.values())))
    with FlopCounterMode(display=False) as counter:
        total, count = job.loss_of(job.run_model(model, batch), batch)
        total.backward()
    refused, legal = {}, facts_of(job, layout_of(job))
    for name, worlds in settings["contestants"].items():
        for world in worlds:
            refused[f"{name}@{world}"] = _refused(name, world, job, legal)
    titles = {}
    for name in settings["contestants"]:
        adapter = None if _is_strategy(name) else adapter_of(name)
        titles[name] = [adapter.title, adapter.same_as, adapter.exact] if adapter is not None else None
    return {
        "name": job.name,
        "batch": job.global_batch,
        "steps": job.steps,
        "samples": len(job.train),
        "parameters": sum(each.numel() for each in model.parameters()),
        "counted_per_sample": float(count) / samples,
        "flops_per_sample": counter.get_total_flops() / samples,
        "batch_norm": bool(batch_norms(model)),
        "evaluate_every": job.evaluate_every,
        "target": None if job.target is None else [job.target.metric, job.target.value, job.target.better],
        "clip": job.clip,
        "predicted": predicted_steps(job, settings["contestants"]),
        "refused": refused,
        "titles": titles,
        "peak_flops_per_s": measure_peak(),
        "environment": environment(),
    }


def predicted_steps(job: Job, names: Mapping[str, Any]) -> dict[str, float | None]:
    """The plan's estimate of each strategy on this machine, seconds a step; none where it was not calibrated."""
    from shoal.calibration.job_model import job_model, plane_cuts_of
    from shoal.estimate.steps.price import price_step
    from shoal.estimate.steps.read import machine_here

    machine, found = machine_here(), dict[str, float | None]()
    if machine is None:
        return found
    strategies = {name: parse(name) for name in names if _is_strategy(name)}
    model, _ = job_model(job, planes=plane_cuts_of(strategies.values()))
    for name, strategy in strategies.items():
        if strategy.world <= machine.ranks:
            with contextlib.suppress(ValueError, NotImplementedError, KeyError):
                found[name] = price_step(model, strategy, machine).step_s
    return found


def _is_strategy(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _refused(name: str, world: int, job: Job, legal: ModelFacts) -> str:
    if _is_strategy(name):
        refusals = check(parse(name), world=world, facts=legal)
        return refusals[0].reason if refusals else cannot_run(parse(name)) or ""
    adapter = adapter_of(name)
    if why := adapter.missing():
        return why
    if adapter.single and world > 1:
        return "it runs on one rank"
    return adapter.refuses(job, world)


def measure_peak() -> float:
    """Operations a second of one rank in a large matrix product: the denominator of the utilisation."""
    side, best = 768, 0.0
    a, b = torch.randn(side, side), torch.randn(side, side)
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * side**3 / (time.perf_counter() - start))
    return best
