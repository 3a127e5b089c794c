"""Rules about the batch, the optimiser and the number of ranks. A rule whose fact is unknown does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import gcd

from shoal.strategy.expression import Strategy
from shoal.strategy.legality.rule import Breach, Case, RuleTable, around
from shoal.strategy.legality.worlds import strategies_for_world
from shoal.strategy.terms.axes import dp, ep, pp, tp
from shoal.strategy.terms.modifiers import accumulate
from shoal.strategy.terms.numerals import counted

rule = RuleTable()

Fixes = Callable[[], Iterable[Strategy | None]]


@rule(
    None,
    why="Every replica computes the same number of samples in each of its micro-batches, or the mean would "
    "not be the mean.",
)
def the_batch_divides(case: Case, index: int, strategy: Strategy) -> Breach | None:
    batch, replicas, micro = case.facts.global_batch, strategy.replicas, strategy.micro_batches
    if batch is None or batch % (replicas * micro) == 0:
        return None
    among = (
        f"{counted(replicas, 'replica')} x {counted(micro, 'micro-batch', 'micro-batches')}"
        if micro > 1
        else f"{counted(replicas, 'replica')}"
    )

    def fixes() -> Iterator[Strategy | None]:
        for place, term in enumerate(strategy.terms):
            name = {dp: "n", ep: "n", tp: "n", accumulate: "k", pp: "micro"}.get(type(term))
            if isinstance(term, tp) and not term.batch:
                continue
            if name is None:
                continue
            now = term.values()[name]
            others = replicas * micro // now if not (isinstance(term, pp) and strategy.term(accumulate)) else 0
            if others and batch % others == 0:
                yield from case.resized(place, around(batch // others, now), name)
        if micro > 1 and batch % replicas:  # Neither factor alone can be mended.
            for place, term in enumerate(strategy.terms):
                if isinstance(term, dp):
                    yield from case.resized(place, around(gcd(batch, batch // gcd(batch, micro)), term.n))
                elif isinstance(term, (pp, accumulate)):
                    yield case.changed(place, **{"micro" if isinstance(term, pp) else "k": 1})

    blamed = next((term for term in strategy.terms if isinstance(term, (dp, ep, accumulate, pp))), strategy)
    return Breach(strategy if micro > 1 else blamed, f"a global batch of {batch} does not divide by {among}", fixes)


def _coupled(case: Case, term: dp | tp | ep | pp, how: str, fixes: Fixes) -> Breach | None:
    if not case.facts.coupled_optimizer:
        return None
    return Breach(term, f"{case.facts.optimizer or 'the optimiser'} couples parameters, and {how}", fixes)


@rule(dp, why="An optimiser that couples parameters (Prodigy, LBFGS) needs all of them, and a shard has slices.")
def sharded_optimizers_do_not_couple(case: Case, index: int, level: dp) -> Breach | None:
    if not level.zero:
        return None
    how = f"zero={level.zero} gives each rank slices of them"
    return _coupled(case, level, how, lambda: [case.changed(index, zero=0)])


@rule(tp, why="An optimiser that couples parameters needs all of them, and a rank of tp has parts.")
def cut_layers_need_optimizers_that_do_not_couple(case: Case, index: int, cut: tp) -> Breach | None:
    if cut.n == 1:
        return None
    fixes = lambda: [case.put(index, dp(cut.n)), case.put(index)]  # noqa: E731
    return _coupled(case, cut, "tp gives each rank slices of them", fixes)


@rule(ep, why="An optimiser that couples parameters needs all of them, and a rank of ep has some of the experts.")
def split_experts_need_optimizers_that_do_not_couple(case: Case, index: int, experts: ep) -> Breach | None:
    if experts.n == 1:
        return None
    fixes = lambda: [case.put(index, dp(experts.n)), case.put(index)]  # noqa: E731
    return _coupled(case, experts, "ep gives each rank some of the experts", fixes)


@rule(pp, why="An optimiser that couples parameters needs all of them on every rank.")
def stages_need_optimizers_that_do_not_couple(case: Case, index: int, stages: pp) -> Breach | None:
    if stages.n == 1:
        return None
    fixes = lambda: [case.put(index, dp(stages.n)), case.put(index)]  # noqa: E731
    return _coupled(case, stages, "pp gives each rank some of them", fixes)


@rule(None, why="Every rank has a place on the mesh, and every place has a rank.")
def ranks_match_the_world(case: Case, index: int, strategy: Strategy) -> Breach | None:
    world = case.world
    if world is None or strategy.world == world:
        return None
    return Breach(
        strategy,
        f"the strategy needs {strategy.world:,} {'rank' if strategy.world == 1 else 'ranks'}, {world:,} "
        f"{'was' if world == 1 else 'were'} given",
        lambda: strategies_for_world(strategy, world),
    )
