"""Rules about losses that are not sums over samples: over which splits of a batch they remain what they are."""

from __future__ import annotations

from shoal.strategy.legality.rule import Breach, Case, RuleTable
from shoal.strategy.terms.axes import cp, dp, pp
from shoal.strategy.terms.modifiers import accumulate
from shoal.strategy.terms.sync import bsp

rule = RuleTable()

WAY_OUT = 'declare loss_over="micro-batch" if each micro-batch is meant to have a loss of its own'


@rule(accumulate, why="A loss over the global batch needs the outputs of all its samples at once.")
def batch_loss_accumulates_nothing(case: Case, index: int, term: accumulate) -> Breach | None:
    if case.facts.loss_over != "batch" or term.k == 1:
        return None
    return Breach(
        term,
        f"the loss is one of the global batch, of which each micro-batch has only a part; leave it out, or {WAY_OUT}",
        lambda: [case.put(index)],
    )


@rule(pp, why="A loss over the global batch needs the outputs of all its samples at once.")
def batch_loss_in_one_micro_batch(case: Case, index: int, term: pp) -> Breach | None:
    if case.facts.loss_over != "batch" or (term.micro == 1 and term.schedule != "pipedream"):
        return None
    return Breach(
        term,
        f"the loss is one of the global batch, of which each micro-batch has only a part; use micro=1, or {WAY_OUT}",
        lambda: [case.put(index, dp(term.n)), case.changed(index, micro=1, schedule="gpipe")],
    )


@rule(cp, why="A loss over the global batch is computed from gathered outputs, which context parallelism cuts.")
def batch_loss_has_full_sequences(case: Case, index: int, term: cp) -> Breach | None:
    if case.facts.loss_over != "batch" or term.n == 1:
        return None
    return Breach(
        term,
        "the loss is one of the global batch, and outputs are gathered over its samples, not over parts of a sequence",
        lambda: [case.put(index, dp(term.n)), case.put(index)],
    )


@rule(dp, why="A loss over the global batch needs the outputs of all its samples at once.")
def batch_loss_waits_for_all_replicas(case: Case, index: int, level: dp) -> Breach | None:
    if case.facts.loss_over != "batch" or isinstance(level.sync, bsp) or level.n == 1:
        return None
    return Breach(
        level,
        f"the loss is one of the global batch, and under {type(level.sync).__name__} a replica knows its own samples "
        "only; use sync=bsp()",
        lambda: [case.changed(index, sync=bsp(), via=None)],
    )


@rule(None, why="Synchronised batch norm joins the parts of a batch that a loss per micro-batch keeps separate.")
def micro_batch_loss_keeps_parts_separate(case: Case, index: int, strategy: object) -> Breach | None:
    if case.facts.loss_over != "micro-batch" or case.facts.batch_norm != "sync" or case.strategy.replicas == 1:
        return None
    return Breach(
        case.strategy,
        'the loss is one of each part of a batch (loss_over="micro-batch"), but batch norm is synchronised over all of '
        'them; set batch_norm="local", or use a loss over "samples" or "batch"',
    )
