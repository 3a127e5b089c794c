"""What a forward leaves for the next one outside of parameters and buffers: whether a resumed run, and the stages of a
pipeline, go on as one unbroken process does.

Checkpoints hold parameters and persistent buffers. What else a forward changes and the next one reads is lost: Python
attributes of modules, buffers with persistent=False, what a loss or a global keeps. It is found by calling: a model
after one forward, and a new one that was given all that a checkpoint would give it, must compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shoal.job import Batch, Job, JobError
from shoal.layout.chain import Chain
from shoal.layout.held_outside import Outside
from shoal.layout.held_state import HeldNow
from shoal.proof.counters import LATER, counters, numbers, set_counter
from shoal.proof.data_reads import same_values
from shoal.proof.gate_model import perturb
from shoal.proof.undropped import drawing_alike
from shoal.strategy import Strategy, pp
from shoal.strategy.islands import islands

SAMPLES = 8
TOLERANCE = 1e-7
"""Largest relative difference of two losses that are the same."""


def require_resumable(job: Job) -> None:
    """Refuses a job whose forwards read what a checkpoint does not hold.

    Raises:
        JobError: With the names of what would be lost.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            lost = _lost(job)
        except JobError:
            raise
        except Exception:  # Whatever the user's code raises here says nothing about a resume.
            return
    if lost:
        raise JobError(
            f"job {job.name!r}: a forward changes {', '.join(lost)}, and the next one reads it, but no checkpoint "
            "holds it, so a resumed run would go on otherwise. Keep it in a buffer of the model (register_buffer), or "
            "train without checkpoints (--checkpoint-every 0)"
        )


def require_state_in_pieces(job: Job, strategy: Strategy, chain: Chain | None) -> None:
    """Refuses a pipeline of a model whose own code, between its pieces, changes what the next forward reads: a stage
    does not run the code behind its last piece, so that earlier stages would go on with old values.

    Raises:
        JobError: With the names of what would be old.
    """
    term = strategy.term(pp)
    if term is None or term.n == 1 or chain is None:
        return
    with torch.random.fork_rng(devices=[]):
        try:
            lost = set(_lost(job)).intersection(_changed_behind(job, chain.links[0].path))
        except Exception:  # Whatever the user's code raises here says nothing about stages.
            return
    inside = tuple(f"{link.path}." for link in chain.links)
    names = sorted(name for name in lost if not name.startswith(inside))
    if names:
        raise JobError(
            f"{term}: the model's own forward changes {', '.join(names)} behind {chain.links[0].path}, and the next "
            "forward reads it, but a stage runs no code behind its last block, so earlier stages would read old "
            "values. Keep it in a buffer of the model (register_buffer), or change it in the block that reads it"
        )


def require_state_averaged(job: Job, strategy: Strategy) -> None:
    """Refuses islands of a model whose forward changes frozen parameters (an EMA teacher): islands average what they
    train and buffers, so each would keep a teacher of its own.

    Raises:
        JobError: With the name of one.
    """
    if len(islands(strategy)) == 1:
        return
    with torch.random.fork_rng(devices=[]), Outside(job).kept():
        model = _built(job)
        frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
        before = {name: param.detach().clone() for name, param in frozen.items()}
        try:
            _loss(job, model, job.train.batch(job.order().indices(0)[:SAMPLES]))
        except Exception:  # What else is wrong is reported elsewhere.
            return
    changed = next((name for name, param in frozen.items() if not same_values(before[name], param)), None)
    if changed is not None:
        raise JobError(
            f"{strategy}: a forward changes the frozen parameter {changed}, and islands average only parameters that "
            "learn and buffers, so each island would keep its own. Keep it in a buffer of the model (register_buffer), "
            "or use sync=bsp()"
        )


def follow_samples(job: Job, names: Iterable[str]) -> list[str]:
    """Of the buffers and frozen parameters that a forward changes, those that end otherwise where it sees other
    samples, or fewer: not a count of calls, nor a mean of parameters."""
    order, ends = job.order(), []
    for at, fewer in ((0, 0), (order.next(0), 2)):
        with torch.random.fork_rng(devices=[]), Outside(job).kept():
            model = _built(job)
            indices = order.indices(at)[:SAMPLES]
            _loss(job, model, job.train.batch(indices[: max(2, len(indices) - fewer)]))
            frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
            ends.append({**dict(model.named_buffers()), **frozen})
    return [name for name in names if name in ends[0] and not same_values(*(end.get(name) for end in ends))]


def _changed_behind(job: Job, first: str) -> list[str]:
    """What a forward changes once the first piece has been called."""
    with Outside(job).kept():
        model, held = _built(job), []
        model.get_submodule(first).register_forward_pre_hook(lambda *_: held.append(HeldNow(model.modules())))
        _loss(job, model, job.train.batch(job.order().indices(0)[:SAMPLES]))
        return held[0].changed_names(model)


def _lost(job: Job) -> list[str]:
    order = job.order()
    first, batch = (job.train.batch(order.indices(at)[:SAMPLES]) for at in (0, order.next(0)))
    outside = Outside(job)
    with outside.kept():
        model = _built(job)
        before, beyond, counted = HeldNow(model.modules()), HeldNow((), outside.held), numbers(model)
        _loss(job, model, first)
        _learn(model)  # What the first forward has made of the parameters, the next one would not make of them.
        saved = _saved(model)
        names = [name for name in before.changed_names(model) if name not in saved]
        if beyond.changed()[0]:
            names.append("what the loss, a closure or a global holds")
        if not names:
            return []
        counting = [name for name in counters(counted, numbers(model)) if name not in saved]
        unbroken = _loss(job, model, batch)
        later = []
        for value in LATER if counting else ():
            _put(model, saved)
            for name in counting:
                set_counter(model, name, value)
            later.append(_loss(job, model, batch))
    with outside.kept():
        model = _built(job)
        _put(model, saved)
        resumed = _loss(job, model, batch)
    return names if any(abs(loss - resumed) > TOLERANCE * abs(resumed) for loss in (unbroken, *later)) else []


def _built(job: Job) -> nn.Module:
    """As if it had learned already: an average of parameters that starts as their copy would not move."""
    torch.manual_seed(job.seed)
    model = job.model().train()
    _learn(model)
    return model


def _learn(model: nn.Module) -> None:
    """Moves what an optimiser would move."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad and param.numel():
                perturb(name, param)


def _loss(job: Job, model: nn.Module, batch: Batch) -> float:
    with drawing_alike():
        return float(job.loss_of(job.run_model(model, batch), batch)[0].detach())


def _saved(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint holds."""
    kept = model.state_dict(keep_vars=True)
    return {name: value.detach().clone() for name, value in kept.items() if isinstance(value, torch.Tensor)}


def _put(model: nn.Module, saved: dict[str, Any]) -> None:
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in saved.items():
            if name in held:
                held[name].copy_(value)
