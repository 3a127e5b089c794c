"""Measures a run's job alone: what of a rank's micro-batch grows with its samples, the update, activations.

On as many processes as the run had, so that cores and memory are shared alike; each works by itself. Times are those of
its thread on a core, which other programs hardly change.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from shoal.comparison.explaining.evidence import Probed
from shoal.launch import RankFailed, run_ranks
from shoal.strategy import StrategyError, parse
from shoal.training.record.run import Run

TIMES = 7
LARGER = 4
MOST_S = 0.5
"""A micro-batch that takes longer is not probed: no overhead is a large part of it."""
MOST_PROCESSES = 4


def probe(run: Run) -> tuple[Probed | None, str]:
    """What was measured; nothing, and why, where the job is not there any more or a step is too long."""
    rows = [row for row in run.summary.get("ranks") or () if row]
    try:
        strategy = parse(run.strategy)
    except StrategyError:
        return None, ""
    if not rows:
        return None, ""
    samples = run.steps[0]["samples"] if run.steps else 0
    mine = max(1, samples // (strategy.replicas * strategy.micro_batches))
    busy_s = statistics.median(row["cpu_s"] for row in rows) / strategy.micro_batches
    if busy_s > MOST_S:
        return None, ""
    settings = {"arguments": dict(run.arguments), "samples": mine}
    try:
        found = run_ranks(
            "shoal.comparison.explaining.probe:measure",
            settings,
            ranks=min(len(rows), MOST_PROCESSES),
            hang_after_s=60,
        )
    except RankFailed as error:
        return None, f"the job could not be probed, so a small batch is not recognised: {error}"
    return _median([each for each in found if each]), ""


def _median(rows: list[dict[str, Any]]) -> Probed:
    timed = ("fixed_s", "growing_s", "update_s", "forward_s")
    middle = {name: statistics.median(row[name] for row in rows) for name in timed}
    first = {**rows[0], "parameters": [tuple(each) for each in rows[0]["parameters"]]}
    return Probed(**{**first, **middle})


def measure(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In one process: the run's job with a rank's share of a micro-batch, and with several times as many samples."""
    import numpy as np
    import torch

    from shoal.job import param_groups
    from shoal.launch.devices import memory_limit_bytes
    from shoal.runtime.setup import job_from
    from shoal.runtime.step import build_model
    from shoal.training.options import TrainOptions

    options = TrainOptions.from_json({k: v for k, v in settings["arguments"].items() if v is not None})
    job = replace(job_from(options), callbacks=())
    model = build_model(job)
    model.train()
    optimizer = job.optimizer(param_groups(model, job.options))
    count = min(settings["samples"], max(1, len(job.train) // LARGER))
    indices = job.order().indices(0)

    def batch(times: int) -> Any:
        return job.train.batch(np.resize(indices, times * count))

    def forward(batch: Any) -> Any:
        total, counted = job.loss_of(job.run_model(model, batch), batch)
        return total / counted

    def passes(batch: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        start = time.thread_time()
        forward(batch).backward()
        return time.thread_time() - start

    def update() -> float:
        start = time.thread_time()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        return time.thread_time() - start

    small, large = batch(1), batch(LARGER)
    one_s, update_s, many_s, forward_s = [], [], [], []
    for turn in range(TIMES + 2):
        first, updated, many = passes(small), update(), passes(large)
        start = time.thread_time()
        forward(small)
        ahead = time.thread_time() - start
        if turn >= 2:
            one_s.append(first)
            update_s.append(updated)
            many_s.append(many)
            forward_s.append(ahead)
    one, many = statistics.median(one_s), statistics.median(many_s)
    growing = min(one, max(0.0, (many - one) / (LARGER - 1)))
    sizes = sorted(((n, p.numel() * p.element_size()) for n, p in model.named_parameters()), key=lambda row: -row[1])
    found = Probed(
        samples=count,
        fixed_s=one - growing,
        growing_s=growing,
        update_s=statistics.median(update_s),
        forward_s=statistics.median(forward_s),
        kept_bytes=_kept(lambda: forward(small), model),
        parameters=sizes[:3],
        parameter_bytes=sum(size for _, size in sizes),
        memory_bytes=memory_limit_bytes(),
    )
    return asdict(found)


def _kept(forward: Callable[[], Any], model: Any) -> int:
    """Bytes that backward keeps of a forward, without the parameters."""
    import torch

    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    del loss
    return sum(kept.values())
