"""The random numbers of a job's forwards, serial or under an engine (`job/randomness.py` has the rule).

Where a model draws is found by calling it on a few samples before it is cut; what a rank holds of a drawn tensor
follows from its place along tp and cp. A proof enters the same rule on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.job import Job
from shoal.job.draw_places import Places, draw_places
from shoal.job.draw_plan import Cuts
from shoal.job.random_optimizer import ParameterRange, UpdateDraws
from shoal.job.randomness import Randomness
from shoal.layout.experts.rehearsal import ParametersKept, random_state, rehearsing, set_random_state
from shoal.layout.held_outside import Outside
from shoal.parallel.engine import Engine


def places_of(job: Job, model: nn.Module, dtype: torch.dtype | None = None) -> Places:
    """Where the job's model draws. The model is as it was afterwards."""
    device = next(model.parameters()).device
    outside = Outside(job)

    def run(samples: int) -> None:
        batch = job.train.batch(np.arange(samples) % len(job.train))
        if dtype is not None:
            batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        batch = {k: v.to(device) for k, v in batch.items()}
        job.loss_of(job.run_model(model, batch), batch)

    @contextmanager
    def around() -> Iterator[None]:
        from shoal.runtime.float64 import KeepFloat64

        before = random_state(device)
        try:
            with ExitStack() as stack:
                stack.enter_context(rehearsing(model))
                stack.enter_context(ParametersKept(model))
                stack.enter_context(outside.kept())
                if dtype == torch.float64:
                    stack.enter_context(KeepFloat64())
                yield
        finally:
            set_random_state(before, device)

    training = [(module, module.training) for module in model.modules()]
    model.train()
    others: tuple[Any, Any] = random.getstate(), np.random.get_state()
    try:
        places = draw_places(model, run, around)
        numpy: Any = np.random.get_state()
        moved = others[0] != random.getstate() or others[1][2] != numpy[2]
        return replace(places, other_generators=moved)
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])
        for module, was in training:
            module.training = was


def serial_randomness(job: Job, model: nn.Module, dtype: torch.dtype | None = None) -> Randomness:
    """For a serial run that a parallel one is compared with."""
    randomness = Randomness(job.seed, places_of(job, model, dtype), exact=dtype is not None)
    randomness.install(model)
    return randomness


def serial_update(draws: UpdateDraws | None, params: Mapping[str, nn.Parameter], counter: int) -> Any:
    """Around a serial optimiser's step, the only one of the step that starts at `counter`."""
    if draws is None:
        return nullcontext()
    draws.begin(counter)
    return draws.update(
        (param, [ParameterRange(name, tuple(param.shape), None, 0, param.numel(), 0)]) for name, param in params.items()
    )


def cuts_of(engine: Engine) -> Cuts:
    """What this rank holds of activations that are cut."""
    place, sequence, planes = engine.placement, engine.cut.sequence, engine.cut.planes
    salt = (place.pipeline.index, place.context.index + place.planes.index)

    def positions(size: int) -> np.ndarray:
        assert sequence is not None
        held: Any = sequence.positions(size, torch.device("cpu")).numpy()
        return held

    return Cuts(
        tensor=place.tensor.size,
        tensor_index=place.tensor.index,
        context=place.context.size,
        context_index=place.context.index,
        length=sequence.plan.length if sequence is not None else 0,
        positions=positions if sequence is not None else None,
        salt=salt,
        planes=() if planes is None else tuple(zip(planes.grid.sizes, planes.view.place, strict=True)),
    )
