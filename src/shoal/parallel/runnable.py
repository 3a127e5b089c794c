"""What the engine can run today. The algebra is larger: terms parse, print and explain before they run."""

from __future__ import annotations

from shoal.strategy import (
    Strategy,
    accumulate,
    allreduce,
    amp,
    bsp,
    cp,
    dp,
    ensemble,
    ep,
    none,
    offload,
    pp,
    ps,
    recompute,
    shared,
    spatial,
    tp,
)
from shoal.strategy.islands import is_loose
from shoal.strategy.members import member_strategy
from shoal.strategy.seats import seats_of
from shoal.strategy.terms.sync import Served, hogwild


class NotRunnable(ValueError):
    """A strategy that Shoal can explain but not train yet."""


TWO_LOOSE = (
    "of levels that are not bsp two can be trained, of which each averages all parameters at once and uncompressed, "
    "such as dp(2, sync=diloco(32)) * dp(2, sync=local(4)); others would need an agreement of their own on what an "
    "island of the outer level is; keep sync=... on one level"
)


def cannot_run(strategy: Strategy) -> str | None:
    """Why the engine cannot run a strategy, as a sentence; None if it can."""
    if strategy.term(ensemble) is not None:
        return cannot_run(member_strategy(strategy))  # A member is a run of its own.
    for term in strategy.terms:
        if isinstance(term, dp):
            if isinstance(term.sync, bsp) and term.sync.backup and not isinstance(term.via, ps):
                return f"{term}: a collective waits for all replicas; backup workers need servers, such as via=ps(1)"
            if isinstance(term.via, ps) and (reason := _cannot_serve(strategy, term)):
                return reason
            if missing := term.sync.missing():
                return f"{term}: {missing}"
        elif isinstance(term, amp):
            if term.dtype == "fp16" and (reason := _cannot_scale(strategy, term)):
                return reason
        elif isinstance(term, offload):
            if reason := _cannot_offload(strategy, term):
                return reason
        elif not isinstance(term, (recompute, accumulate, pp, tp, cp, ep, spatial)):
            return (
                f"{term} cannot be trained yet: {type(term).__name__} parses and explains, but has no runtime so far. "
                "What trains today: dp (zero=0..3, several levels), pp, tp, cp, ep, spatial, accumulate, recompute, "
                "amp, offload, ensemble"
            )
    reason = _cannot_compress(strategy) or _cannot_be_loose(strategy)
    if reason is not None:
        return reason
    if any(isinstance(level.via, shared) and not is_loose(level) for level in strategy.dp_levels):
        if any(level.zero for level in strategy.dp_levels):
            return f"{strategy}: zero on one level and via=shared() on another cannot be trained yet; leave one out"
        schedule = next((term.schedule for term in strategy.terms if isinstance(term, pp)), None)
        if schedule == "pipedream":
            return f"{strategy}: pipedream keeps versions of its weights, and in shared memory there is one; use 1f1b"
    return None


def _cannot_offload(strategy: Strategy, term: offload) -> str | None:
    """Why what a term names cannot wait below."""
    if term.what == "gradients":
        return (
            f"{term}: gradients are reduced, clipped by the norm over all of them and used in one step, so none of "
            'them waits; use offload("optimizer"), or zero=2, which shards them'
        )
    if any(isinstance(other, pp) and other.schedule == "pipedream" for other in strategy.terms):
        return f"{term}: pipedream updates while micro-batches are under way, from several versions; use 1f1b"
    if term.what == "activations":
        return None
    for level in strategy.dp_levels:
        if isinstance(level.via, ps):
            return f"{term} with {level}: the servers hold what would be offloaded; use via=allreduce()"
        if term.what == "parameters" and is_loose(level):
            return f"{term} with {level}: islands exchange their full parameters; use a bsp level, or leave it out"
    if term.what == "parameters" and strategy.dp_levels and not any(level.zero == 3 for level in strategy.dp_levels):
        level = strategy.dp_levels[-1]
        return (
            f"{term} with {level}: its replicas keep full parameters for each other's updates; use zero=3, where each "
            f"has a shard that can wait, as in {strategy.replace(level, level.replace(zero=3))}"
        )
    return None


def _cannot_scale(strategy: Strategy, term: amp) -> str | None:
    """Why the loss cannot be scaled for fp16."""
    for level in strategy.dp_levels:
        if not isinstance(level.compress, none):
            return f'{term} with {level}: an overflow would stay in what compression has kept; use amp("bf16")'
        if isinstance(level.via, ps):
            return f'{term} with {level}: servers update without knowing of an overflow; use amp("bf16")'
    return None


def _cannot_serve(strategy: Strategy, level: dp) -> str | None:
    """Why a level with parameter servers cannot run."""
    if not isinstance(level.sync, Served):
        return f"{level}: models that are averaged through a server cannot be trained yet; use via=allreduce()"
    if strategy.terms[0] != level:
        return f"{strategy}: the level with servers stands outermost; put {level} first"
    if any(isinstance(other.via, ps | shared) for other in strategy.dp_levels if other is not level):
        return f"{strategy}: servers on one level and via=ps or via=shared on another cannot be trained yet; keep one"
    if any(is_loose(other) for other in strategy.dp_levels if other is not level):
        return f"{strategy}: {TWO_LOOSE}"
    if not isinstance(level.compress, none) and level.compress.pushed_bytes(1 << 20, 4) is None:
        return (
            f"{level}: a server reads each worker's push by itself and knows its size; {level.compress} is made by all "
            "ranks together, or sized by the data; use another, such as topk(0.01), int8() or onebit()"
        )
    for term in strategy.terms:
        if isinstance(term, pp) and term.schedule == "pipedream":
            return f"{strategy}: pipedream steps by itself, and servers step for all; use 1f1b"
    return None


def _cannot_compress(strategy: Strategy) -> str | None:
    levels = strategy.dp_levels
    compressing = [place for place, level in enumerate(levels) if not isinstance(level.compress, none)]
    if not compressing:
        return None
    if len(compressing) > 1:
        return f"{strategy}: two levels that compress cannot be trained yet; compress on the outer one, between hosts"
    if any(level.zero for level in levels[: compressing[0]]):
        return (
            f"{strategy}: zero on a level outside the one that compresses cannot be trained yet; put zero on the level "
            "that compresses, or on one inside it"
        )
    if any(isinstance(term, pp) and term.schedule == "pipedream" for term in strategy.terms):
        return f"{strategy}: pipedream with compress cannot be trained yet; use 1f1b, or leave compress out"
    return None


def _nest(loose: list[dp]) -> bool:
    """Whether an outer level averages what an inner one has averaged: both do so at once and fully, every few steps."""
    plans = [getattr(level.sync, "plan", None) for level in loose]
    plain = all(plan is not None and plan.plain and not plan.start for plan in plans)
    dense = all(isinstance(level.compress, none) and isinstance(level.via, allreduce) for level in loose)
    return len(loose) == 2 and plain and dense


def _cannot_be_loose(strategy: Strategy) -> str | None:
    loose = [level for level in strategy.dp_levels if not isinstance(level.sync, bsp)]
    if not loose:
        return None
    if len(loose) > 1:
        return None if _nest(loose) else f"{strategy}: {TWO_LOOSE}"
    if isinstance(loose[0].via, ps):
        return None
    if isinstance(loose[0].sync, hogwild):
        return None
    if loose[0].sync.scheduling != "synchronous" and strategy.world != loose[0].n:
        return (
            f"{strategy}: the ranks of an island would answer other islands at different times; under {loose[0].sync} "
            'each replica is one rank; or use mode="sync", or leave quorum out'
        )
    if not isinstance(loose[0].via, allreduce):
        return f"{loose[0]}: models are averaged with an all-reduce; use via=allreduce()"
    if not isinstance(loose[0].compress, none) and not loose[0].sync.compresses:
        return (
            f"{loose[0]}: {type(loose[0].sync).__name__} exchanges full models, so there is no difference that could "
            "be compressed; leave compress out, or use local(h), diloco(h) or bmuf(h)"
        )
    if any(isinstance(term, pp) and term.schedule == "pipedream" for term in strategy.terms):
        return f"{strategy}: pipedream inside {loose[0]} cannot be trained yet; use 1f1b"
    return None


def require_runnable(strategy: Strategy, *, elementwise: bool = True, coupled: bool = False) -> None:
    """Raises NotRunnable with the reason. `elementwise`: the optimiser updates each element by itself; `coupled`: it
    needs all parameters together."""
    reason = cannot_run(strategy)
    if reason is not None:
        raise NotRunnable(reason)
    seats = seats_of(strategy)
    if not elementwise and seats is not None and (coupled or seats.positions > 1):
        needs = "all parameters together" if coupled else "full parameters (it is not element-wise)"
        held = "have a part of them each" if coupled else "hold what each of a worker's ranks pushes"
        raise NotRunnable(
            f"{strategy}: the optimiser needs {needs}, and parameter servers {held}; use workers of one rank, "
            "via=allreduce(), or an element-wise optimiser such as AdamW"
        )
    if not coupled:
        return
    if any(level.zero or isinstance(level.via, shared) for level in strategy.dp_levels):
        raise NotRunnable(
            f"{strategy}: the optimiser needs all parameters together, and zero >= 1 or via=shared() would give it "
            "slices; use zero=0 and via=allreduce(), or an optimiser that updates each parameter by itself, such as "
            "AdamW or Muon"
        )
    if any(isinstance(term, (pp, tp, ep)) and term.n > 1 for term in strategy.terms):
        raise NotRunnable(
            f"{strategy}: the optimiser needs all parameters together, and pp, tp and ep leave each rank some of them; "
            "use dp with zero=0, or an optimiser that updates each parameter by itself, such as AdamW or Muon"
        )
