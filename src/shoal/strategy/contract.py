"""What a strategy promises: the serial run, the serial run with stale gradients, or only the same target loss.

The contract follows from the terms and from the workload. Each term declares how it differs from the serial run;
the weakest promise holds for the strategy. `verify` measures what is promised here.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.strategy.expression import Strategy, as_strategy
from shoal.strategy.facts import ModelFacts
from shoal.strategy.terms import cp, dp, ep, pp, recompute, spatial, ssp, tp
from shoal.strategy.terms.sync import SAME_TARGET
from shoal.strategy.terms.term import Kind, Promise, Term

KINDS: tuple[Kind, ...] = ("exact", "bounded", "statistical")
"""From the strongest promise to the weakest."""

PER_MICRO_BATCH = "per micro-batch"
"""How reasons begin that make the micro-batch part of the model."""
EXACT_BAND = (
    "every parameter of the serial run, relative difference at most 1e-10 in float64 (more only where the serial run "
    "itself moves by more under another order of sums, which is measured)"
)


@dataclass(frozen=True, slots=True)
class Contract:
    """How a run under a strategy relates to the serial run."""

    kind: Kind
    staleness: int | None
    """Updates by which a gradient may be late: 0 if exact, None if without bound."""
    band: str
    """What is compared, and how near it must come."""
    reasons: tuple[str, ...]
    """Why it is not better; and for an exact contract, against which serial run it is exact."""
    within: float = 0.05
    """How far the loss may be from that of the serial run, relative to it, where the contract is statistical."""
    micro_batches: int = 1
    """Pieces of a batch that the serial run computes one after the other. 1, the global batch at once, unless the
    contract is per micro-batch; the reasons then say why."""
    parts: int = 1
    """Pieces of each of these, one for each replica, that the serial run computes separately."""

    def __str__(self) -> str:
        return f"bounded({self.staleness})" if self.kind == "bounded" else self.kind


def contract(strategy: Strategy | Term, facts: ModelFacts | None = None) -> Contract:
    """The contract of a strategy, on a workload if its facts are given."""
    strategy = as_strategy(strategy)
    facts = facts or ModelFacts()
    promises = [promise for term in strategy.terms for promise in term.promises()]
    promises += _workload_promises(strategy, facts)
    kind: Kind = max((promise.kind for promise in promises), key=KINDS.index, default="exact")
    reasons = tuple(promise.reason for promise in promises) + _notes(strategy, facts)
    pieces = _pieces(strategy, facts)
    if kind == "statistical":
        bands = dict.fromkeys(promise.band for promise in promises if promise.kind == kind)
        within = max(promise.within for promise in promises if promise.kind == kind)
        return Contract(kind, None, "; ".join(bands), reasons, within, *pieces)
    if kind == "bounded":
        # Delays on different axes happen one after the other, so their sum bounds the total.
        staleness = sum(promise.staleness for promise in promises)
        return Contract(kind, staleness, f"every gradient at most {staleness} updates late", reasons, 0.05, *pieces)
    reasons = reasons or ("every term leaves the numbers as they are, up to the order of sums",)
    return Contract(kind, 0, EXACT_BAND, reasons, 0.05, *pieces)


def _pieces(strategy: Strategy, facts: ModelFacts) -> tuple[int, int]:
    """(micro-batches, parts of each) that the serial run computes one after the other."""
    if facts.loss_over == "micro-batch":
        return strategy.micro_batches, strategy.replicas
    pipeline = strategy.term(pp)
    unflushed = pipeline is not None and pipeline.schedule == "pipedream"
    per_micro_batch = unflushed or facts.batch_norm is not None or bool(facts.forward_state)
    return (strategy.micro_batches if per_micro_batch else 1), 1


def _parts(strategy: Strategy, cls: type[dp | pp | tp | cp | ep | spatial]) -> int:
    term = strategy.term(cls)
    return term.n if term is not None else 1


def _workload_promises(strategy: Strategy, facts: ModelFacts) -> list[Promise]:
    """What the workload takes away from the terms' own promises."""
    promises = []
    if facts.batch_norm == "local" and strategy.replicas > 1:
        reason = "batch norm is local: each replica normalises by the statistics of its own samples"
        promises.append(Promise("statistical", reason, band=SAME_TARGET))
    if facts.expert_capacity and strategy.replicas * _parts(strategy, cp) > 1:
        reason = "experts drop tokens beyond a capacity that each rank counts for itself"
        promises.append(Promise("statistical", reason, band=SAME_TARGET))
    return promises


def _notes(strategy: Strategy, facts: ModelFacts) -> tuple[str, ...]:
    """What keeps the promises true on this workload: against which serial run, and what is summed over which
    ranks.
    """
    notes = []
    split = strategy.replicas * strategy.micro_batches > 1
    if facts.batch_norm is not None and strategy.micro_batches > 1:
        micro = strategy.micro_batches
        notes.append(
            f"{PER_MICRO_BATCH}: batch norm sees one micro-batch at a time; compare with a serial run that accumulates "
            f"the same {micro}"
        )
    if facts.batch_norm == "sync" and strategy.replicas > 1:
        notes.append("batch norm is synchronised: statistics are taken over all replicas")
    if facts.loss_over == "micro-batch" and split:
        micro, parts = strategy.micro_batches, strategy.replicas
        notes.append(
            f"{PER_MICRO_BATCH}: the job declares its loss so; compare with a serial run that accumulates the same "
            f"{micro * parts} parts of a batch ({micro} micro-batches of {parts})"
        )
    if facts.loss_over == "batch" and strategy.replicas > 1:
        notes.append("the loss is one of the global batch: replicas gather the model's outputs")
    if facts.forward_state and strategy.micro_batches > 1:
        names = ", ".join(facts.forward_state[:3])
        notes.append(
            f"{PER_MICRO_BATCH}: every forward changes {names}; compare with a serial run that accumulates the same "
            f"{strategy.micro_batches} micro-batches"
        )
    if facts.dropout and strategy.terms:
        notes.append("dropout stays on: samples draw by their place in the model, so masks are those of the serial run")
        if strategy.term(recompute) is not None:
            notes.append("recomputation draws the same dropout masks again")
    if facts.tied and _parts(strategy, pp) > 1:
        notes.append(
            "tied weights: the gradients of the first and the last stage are summed, and both copies step alike"
        )
    pipeline = strategy.term(pp)
    if pipeline is not None and pipeline.schedule == "pipedream" and pipeline.micro > 1:
        notes.append("pipedream steps after every micro-batch: compare with a serial run that does so too")
    cut = _parts(strategy, pp) * _parts(strategy, tp) * _parts(strategy, ep) > 1
    if facts.clips and (cut or any(level.zero for level in strategy.dp_levels)):
        notes.append("clipping: the norm is taken over the parts of all ranks, each parameter counted once")
    if facts.token_weighted and split:
        notes.append("token-weighted loss: every micro-batch is divided by the global number of tokens")
    for level in strategy.dp_levels:
        if isinstance(level.sync, ssp) and level.sync.s == 0:
            notes.append("ssp(0) waits for all replicas every step, as bsp() does")
        if level.sync.period is not None and level.n == 1 and level.sync.drift(1) is None:
            notes.append("a single replica has nothing to average")
    return tuple(notes)
