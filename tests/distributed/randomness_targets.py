"""What ranks draw in a training run: every tensor of random numbers, by its place in the model and its sample."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from shoal.job import load_job
from shoal.job.draw_places import Place
from shoal.job.draw_plan import Cuts, PlacedNumbers
from shoal.launch.join import join, leave
from shoal.runtime.setup import prepare
from shoal.strategy import parse

_honest_values = PlacedNumbers.values
_honest_parts = Cuts.parts


def drawn(arguments: dict[str, Any], channel: Any) -> list[list[dict[str, Any]]]:
    """For each strategy what this rank drew in two steps: rows of (place, sample, elements, how many are below 0.7, a
    digest of which)."""
    me = join()
    _plant(arguments.get("fault"))
    found: list[list[dict[str, Any]]] = []

    def noting(self: Any, forward: Any, place: Place, plan: Any, shape: Any, kind: str) -> torch.Tensor:
        numbers = _honest_values(self, forward, place, plan, shape, kind)
        samples = forward.gathered if plan.gathered else forward.samples
        rows = numbers.movedim(plan.dim, 0).reshape(len(samples), -1) < 0.7
        for sample, row in zip(samples, rows, strict=True):
            bits = row.numpy().tobytes()
            digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
            place_text = f"{place.path}#{place.call}.{place.draw}"
            found[-1].append(
                {"place": place_text, "sample": sample, "size": row.numel(), "kept": int(row.sum()), "bits": digest}
            )
        return numbers

    PlacedNumbers.values = noting  # type: ignore[method-assign]
    job = load_job(arguments["job"])
    for text in arguments["strategies"]:
        found.append([])
        ready = prepare(job, parse(text), rank=me.rank, backend=me.backend)
        counter = 0
        for step in range(2):
            ready.runner.step(step, counter)
            counter = ready.runner.order.next(counter)
        ready.engine.close()
    leave()
    return found


def _plant(fault: str | None) -> None:
    """The mistakes that this must find: stages that start from one seed, ranks of tp or cp that take the same part."""
    if fault == "one key for all places":
        Place.key = 7  # type: ignore[assignment, misc]
    elif fault == "first part on every rank":
        Cuts.parts = lambda self, whole, local: _honest_parts(  # type: ignore[method-assign]
            replace(self, tensor_index=0, context_index=0, positions=lambda size: _first(size, self)), whole, local
        )
    elif fault is not None:
        raise ValueError(fault)


def _first(size: int, cuts: Cuts) -> Any:
    return torch.arange(size // cuts.context).numpy()
