"""The engine without Job, for those who own their training loop: three lines in their script.

    engine = shoal.engine(model, "dp(2, zero=1)", optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-4))
    ...
    engine.backward(loss_sum, count)      # where loss.backward() stood
    engine.step()                         # where optimizer.step() stood

Run it under `shoal launch script.py --ranks 2` or torchrun. `engine.share(len(batch))` is this rank's slice of a batch.
The strategy's terms apply here as in a Job: amp("bf16") around the model's forward, accumulate(k) over k calls of
`backward`, recompute inside the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.job import Batch
from shoal.job.buffers import BufferMode, buffer_modes, wrong_declaration
from shoal.job.elementwise import probe
from shoal.job.facts import require_initialised
from shoal.job.random_optimizer import UpdateDraws, draws_numbers, without_draws
from shoal.launch.join import join
from shoal.parallel.apply import Options, parallelize
from shoal.parallel.buffers import buffer_exchange
from shoal.parallel.optimizer import Factory
from shoal.parallel.placement import mesh_of
from shoal.parallel.runnable import NotRunnable
from shoal.strategy import ModelFacts, Strategy, Term, as_strategy, cp, ep, parse, pp, ps, require_legal, spatial, tp
from shoal.training.own_batches import OwnBatches
from shoal.training.own_engine import OwnLoop


def engine(
    model: nn.Module,
    strategy: str | Strategy | Term,
    *,
    optimizer: Factory,
    options: Options = lambda name, param: {},
    clip: float | None = None,
    sync_batch_norm: bool = True,
    buffers: BufferMode | Mapping[str, BufferMode] | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
    loss: Callable[[Any, Batch], Any] | None = None,
    inputs: tuple[str, ...] | dict[str, str] = ("x",),
    metrics: Callable[[Any, Batch], Any] | None = None,
    seed: int = 0,
) -> OwnLoop:
    """Joins the ranks that a launcher started and makes the model train by the strategy.

    Args:
        model: The model; rank 0's values are the start of all ranks.
        strategy: An expression such as "dp(2, zero=1)". Axes that cut the model (pp, tp, cp, ep, spatial) need
            `example` and `loss`, and `engine.train_batch` in place of `backward` and `step`.
        optimizer: Takes parameter groups, gives the optimiser.
        options: (parameter name, parameter) -> its own optimiser options.
        clip: Largest global norm of the gradient.
        sync_batch_norm: Whether batch norm takes its statistics over all ranks.
        buffers: What replicas do with buffers that a forward updates (codebooks, moving averages): "average" (weighted
            by the counts given to `backward`), "sum", "broadcast", "local", or {pattern: one of these}.
        example: A batch of a few samples, {name: tensor}, from which the model's structure is inferred.
        loss: (model output, batch) -> (SUM of the losses, how many).
        inputs: Which entries of a batch the model takes: by position, or {argument name: entry}.
        metrics: (model output, batch) -> {name: (sum, count)}, for `evaluate_batch`. None: the loss.
        seed: Of what the model draws at random in `train_batch`.

    Example:
        with shoal.engine(model, "dp(2, zero=1)", optimizer=lambda groups: torch.optim.AdamW(groups)) as engine:
            engine.backward(loss_sum, count)
            engine.step()

    Raises:
        ValueError: The strategy is not legal for this world, model or optimiser, or `buffers` does not fit the model.
    """
    if wrong := wrong_declaration(buffers):
        raise ValueError(f"shoal.engine: {wrong}")
    modes = buffer_modes(buffers, model)
    wanted = parse(strategy) if isinstance(strategy, str) else as_strategy(strategy)
    me = join()
    require_initialised(model, type(model).__name__)
    tried = probe(without_draws(optimizer), model, options)
    if any(isinstance(level.via, ps) for level in wanted.dp_levels):
        raise NotRunnable(f"{wanted}: parameter servers train a Job (`shoal train`), not yet a loop of your own")
    torch.set_num_threads(1 if me.world > 1 and me.device.type == "cpu" else torch.get_num_threads())
    if example is not None:
        if me.device.type != "cpu":
            model.to(me.device)
        batches = OwnBatches.of(
            model,
            wanted,
            me,
            tried,
            example=example,
            loss=loss,
            inputs=inputs,
            metrics=metrics,
            optimizer=optimizer,
            options=options,
            clip=clip,
            batch_norm="sync" if sync_batch_norm else "local",
            buffers=buffers,
            seed=seed,
        )
        running = batches.engine
        running.buffers = buffer_exchange(model, running.placement, modes, running.absent)
        return OwnLoop(running, wanted, declared=modes, place=me, batches=batches)
    cutting = next((term for term in wanted.terms if isinstance(term, pp | tp | cp | ep | spatial)), None)
    if cutting is not None:
        raise NotRunnable(
            f"{cutting}: how the model may be cut is inferred from a batch and its loss; give shoal.engine(..., "
            'example={"x": x, "y": y}, loss=lambda output, batch: (sum, count)) and call engine.train_batch(batch)'
        )
    facts = ModelFacts(elementwise_optimizer=tried.elementwise, coupled_optimizer=tried.coupled, optimizer=tried.name)
    require_legal(wanted, world=me.world, facts=facts)
    mesh = mesh_of(wanted, rank=me.rank, backend=me.backend)
    if me.device.type != "cpu":
        model.to(me.device)
    running = parallelize(
        model,
        wanted,
        mesh,
        optimizer=optimizer,
        options=options,
        clip=clip,
        elementwise=tried.elementwise,
        coupled=tried.coupled,
        batch_norm="sync" if sync_batch_norm else "local",
        update_draws=UpdateDraws(0) if draws_numbers(optimizer) else None,
    )
    running.buffers = buffer_exchange(model, running.placement, modes, running.absent)
    return OwnLoop(running, wanted, declared=modes, place=me)
