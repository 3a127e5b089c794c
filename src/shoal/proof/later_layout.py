"""Whether the layout of a model that counts its calls also fits the code that it runs at later counts.

A layout is inferred from one forward of the model as it starts. Code that begins at some count (a schedule in forward:
another mask, a norm, a mean over positions) would be cut as if it were not there. So the layout is inferred again with
the counters set forward; what differs then is refused by name. Models that count nothing cost one forward here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.job import Job, JobError
from shoal.layout.held_outside import Outside
from shoal.layout.layout import Layout, facts_of, layout_of
from shoal.proof.counters import LATER, counters, numbers, set_counter
from shoal.proof.undropped import drawing_alike
from shoal.strategy import Strategy, check, pp, tp

SAMPLES = 4


def require_same_layout_later(job: Job, strategy: Strategy) -> None:
    """Refuses axes that cut a model otherwise than it would have to be cut at a later count.

    Raises:
        JobError: With the counter, its value and the reason.
    """
    axes = strategy.cutting_axes
    if not axes:
        return
    with torch.random.fork_rng(devices=[]), Outside(job).kept():
        names = _counters(job)
        if not names:
            return
        known = set(check(strategy, facts=facts_of(job, now := layout_of(job, strategy))))
        for value in LATER:
            later = replace(job, model=_counted(job, names, value))
            try:
                layout = layout_of(later, strategy)
                refusals = [row for row in check(strategy, facts=facts_of(later, layout)) if row not in known]
            except Exception:  # A count that the model may never reach.
                continue
            wrong = refusals[0].reason if refusals else _what_differs(now, layout, strategy)
            if wrong:
                raise JobError(
                    f"{strategy}: once {names[0]} is {value}, {wrong}. A layout is that of the model as it starts: "
                    f"leave {' and '.join(axes)} out, or train that part as a job of its own that starts from the "
                    "weights of the first"
                )


def _counters(job: Job) -> list[str]:
    torch.manual_seed(job.seed)
    model = job.model().train()
    before = numbers(model)
    if not before:
        return []
    batch = job.train.batch(job.order().indices(0)[:SAMPLES])
    try:
        with drawing_alike(), torch.no_grad():
            job.run_model(model, batch)
    except Exception:  # What else is wrong is reported elsewhere.
        return []
    return counters(before, numbers(model))


def _counted(job: Job, names: list[str], value: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = job.model()
        for name in names:
            set_counter(model, name, value)
        return model

    return build


def _what_differs(now: Layout, later: Layout, strategy: Strategy) -> str:
    """Which part of a layout would be another one; empty if none is."""
    for what, of in _PARTS.items():
        if of(now, strategy) != of(later, strategy):
            return f"the model computes with other operations, and {what} would be another one"
    return ""


def _tensors(layout: Layout, strategy: Strategy) -> Any:
    plan, term = layout.tensor, strategy.term(tp)
    if plan is None or term is None:
        return None
    return plan.regions, plan.vocabulary, plan.sequence_dim if term.sequence or term.batch else None


def _sequence(layout: Layout, strategy: Strategy) -> Any:
    return layout.context and replace(layout.context, why_whole="")


def _stages(layout: Layout, strategy: Strategy) -> Any:
    """What crosses each cut, whatever a piece costs."""
    term = strategy.term(pp)
    if layout.chain is None or term is None:
        return None
    links = [
        (link.path, bool(link.why_not), [(w.results, w.arguments, w.beside, w.learns) for w in link.wires])
        for link in layout.chain.links
    ]
    return links, layout.chain.tied, dict(layout.chain.written), layout.chain.renewed


def _experts(layout: Layout, strategy: Strategy) -> Any:
    return layout.experts and layout.experts.layers


_PARTS: dict[str, Callable[[Layout, Strategy], Any]] = {
    "what tp splits": _tensors,
    "how cp cuts the sequence": _sequence,
    "what crosses the stages of pp": _stages,
    "the experts that ep splits": _experts,
}
