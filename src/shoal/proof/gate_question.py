"""What the gate has to check of a job under a strategy, and whether it can; decided before any rank computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
from torch import nn

from shoal.job import Job
from shoal.job.buffers import buffer_modes
from shoal.job.facts import build_without_memory
from shoal.proof.coupling import SamplesCoupled, couples_samples, refusal, splits_batches
from shoal.proof.data_reads import reads_differ
from shoal.proof.fingerprint import fingerprint
from shoal.proof.gate import exact_twin
from shoal.proof.gate_serial import STEPS
from shoal.proof.later_layout import require_same_layout_later
from shoal.proof.optimizer_trials import updates_compare
from shoal.proof.proven import is_proven, remember, said
from shoal.runtime.compiled import require_uncompiled, running_eagerly
from shoal.strategy import ModelFacts, Strategy, contract, is_legal, recompute
from shoal.strategy.contract import PER_MICRO_BATCH

COPIES = 4
"""Of its parameters, in float64, that a rank holds: themselves, gradients and the optimiser's state; the serial steps
hold two more, before and after."""

MORE_SAMPLES_S = 2.0
"""What it may take, once, to try whether samples are independent in larger batches than the smallest."""


class CannotCheck(ValueError):
    """What was given cannot be trained as one process would train it."""


def question(job: Job, strategy: Strategy, facts: ModelFacts, *, backend: str | None = None) -> dict[str, Any] | None:
    """What there is to check, as JSON, and whether it can be; None if one process computes each batch at once and
    nothing twice: that is what would be compared with.

    Raises:
        CannotCheck: Data differ from one read to the next.
        CannotRunCompiled: The strategy acts inside of a compiled model.
    """
    twin = exact_twin(strategy)
    if twin.world == 1 and not splits_batches(twin) and twin.term(recompute) is None:
        return None
    axes = strategy.cutting_axes
    model = build_without_memory(job)
    buffer_modes(job.buffers, model)
    require_uncompiled(model, strategy)
    differ = reads_differ(job)
    if differ and axes:
        raise CannotCheck(f"{differ}. Under {' and '.join(axes)} several ranks read a sample and must see the same")
    return {
        "key": fingerprint(job, model, twin, backend=backend),
        "job": job.name,
        "strategy": str(twin),
        "axes": list(axes),
        "world": twin.world,
        "batch": _batch(twin, facts),
        "optimizer": facts.optimizer,
        "updates": updates_compare(job, steps=STEPS),
        "skip": differ or _why_not(twin, replace(facts, batch_norm=facts.batch_norm and "sync"), model),
        "tries_samples": not differ and _fits(twin, model)[0],
        "messages": [],
    }


def _batch(strategy: Strategy, facts: ModelFacts) -> int:
    most = facts.global_batch or 1
    shares = strategy.replicas * strategy.micro_batches
    batches = (batch for batch in range(2 * shares, most, shares))
    return next((b for b in batches if is_legal(strategy, facts=replace(facts, global_batch=b))), most)


def _why_not(strategy: Strategy, facts: ModelFacts, model: nn.Module) -> str:
    promised = contract(strategy, facts)
    if promised.kind != "exact":
        return f"{strategy} does not promise the numbers of a serial run ({promised.reasons[0]})"
    return _fits(strategy, model)[1]


def _fits(strategy: Strategy, model: nn.Module) -> tuple[bool, str]:
    """Whether a check in float64 fits into this host's memory: one process that tries samples; and why not the ranks,
    empty if they do."""
    elements = sum(param.numel() for param in model.parameters())
    needed = 8 * elements * (COPIES * max(1, strategy.data_parallel) + COPIES + 2)
    free = psutil.virtual_memory().available
    why = f"in float64 it would need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return 8 * elements * COPIES <= free / 2, why if needed > free / 2 else ""


def require_independent(job: Job, strategy: Strategy, facts: ModelFacts) -> list[dict[str, Any]]:
    """Refuses a job whose gradients are not proportional to its loss, under any strategy: the gradient of a sum is
    divided by the count after backward. Refuses to split batches whose loss, count and gradient are not the sums of
    those of their parts.

    Returns:
        Messages for the user: why that was not found out, what is computed per micro-batch, and which fault of the job
        does not matter under this strategy.

    Raises:
        SamplesCoupled: The loss is a mean, the count is wrong or learns, a backward is not linear, samples are coupled,
            or depend on padding.
        JobError: The layout would be another one at a later count.
    """
    splits = splits_batches(strategy)
    with running_eagerly():
        require_same_layout_later(job, strategy)
        found = couples_samples(job, within_s=MORE_SAMPLES_S, strategy=strategy)
    if found.kind in ("unchecked", "random"):
        return [{"event": "warning", "text": found.reason}] if splits else []
    if wrong := refusal(found, strategy):
        raise SamplesCoupled(wrong)
    if found.reason:
        return [{"event": "note", "text": f"strategies that split the batch will be refused: {found.reason}"}]
    reasons = contract(strategy, replace(facts, forward_state=found.state)).reasons
    return [{"event": "note", "text": reason} for reason in reasons if reason.startswith(PER_MICRO_BATCH)]


def require_independent_once(
    job: Job, strategy: Strategy, facts: ModelFacts, asked: dict[str, Any] | None, *, backend: str | None
) -> list[dict[str, Any]]:
    """The same, or what an earlier run was told. `asked`: what `question` gave; it takes the messages along.

    A pass is remembered with the gate's; where there is nothing to gate, here. A model too large to be tried in float64
    is not; nor are data that differ from one read to the next."""
    if asked is not None:
        if is_proven(asked["key"]):
            return said(asked["key"])
        messages = require_independent(job, strategy, facts) if asked["tries_samples"] else []
        asked["messages"] = _lasting(messages)
        return messages
    model = build_without_memory(job)
    key = fingerprint(job, model, exact_twin(strategy), backend=backend)
    if is_proven(key):
        return said(key)
    messages = require_independent(job, strategy, facts) if _fits(strategy, model)[0] else []
    remember(key, job=job.name, strategy=str(strategy), difference=0.0, messages=_lasting(messages))
    return messages


def _lasting(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are about this very training, and so are said in every run."""
    return [row for row in messages if row["event"] == "warning" or row["text"].startswith(PER_MICRO_BATCH)]
