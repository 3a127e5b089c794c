"""Products of axes, drawn from what is legal for a job: the generator, and the draw that every run repeats.

Nothing is hand-picked: hypothesis draws the factors of 4 or 8 ranks, deals them out to axes, chooses their arguments
and modifiers, and legality says which of these the job's model allows.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shoal.job import Job, load_job
from shoal.layout.layout import facts_of, layout_of
from shoal.strategy import ModelFacts, Strategy, Term, accumulate, cp, dp, ep, is_legal, pp, recompute, tp

SIZES = ((2, 2), (4, 2), (2, 4), (2, 2, 2), (2, 2, 2))
"""Factors of 4 and 8; three axes are as likely as two."""


def axis(chance: Random, cls: type[Term], size: int) -> Term:
    """Any term of an exact axis, of a given size."""
    if cls is dp:
        return dp(size, zero=chance.randint(0, 3))
    if cls is pp:
        schedule, chunks = chance.choice(
            [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]
        )
        return pp(size, schedule, micro=chance.choice([2, 3, 4, 6]), chunks=chunks)
    if cls is tp:
        how = chance.choice(["whole", "sequence", "batch"])
        return tp(size, sequence=how == "sequence", batch=how == "batch")
    if cls is cp:
        return cp(size, chance.choice(["ring", "ulysses"]))
    return ep(size)


@st.composite
def products(draw: st.DrawFn) -> Strategy:
    """Two axes or more on 4 or 8 ranks, with or without modifiers; legal for some model or for none. Every choice is as
    likely as any other: hypothesis by itself would prefer what comes first, and micro-batches of one."""
    # As bits: numbers hypothesis also takes from the constants of modules that happen to be loaded, which depend on the
    # tests that ran before.
    bits = draw(st.tuples(*[st.booleans()] * 32))
    chance = Random(sum(bit << place for place, bit in enumerate(bits)))
    sizes = chance.choice(SIZES)
    classes = chance.sample([dp, dp, pp, tp, cp, ep], len(sizes))
    terms = [axis(chance, cls, size) for cls, size in zip(classes, sizes, strict=True)]
    if chance.random() < 0.4:
        terms.append(recompute(chance.choice(["full", "selective"])))
    if chance.random() < 0.4:
        terms.append(accumulate(chance.randint(2, 3)))
    return Strategy(*terms)


@cache
def loaded(spec: str) -> Job:
    return load_job(spec)


FACTS: dict[Any, ModelFacts] = {}
"""By job, axes and how tp cuts: a look into the model takes longer than all other questions."""


def is_legal_for(spec: str, strategy: Strategy) -> bool:
    """Whether a job's model allows it."""
    if not is_legal(strategy):
        return False
    tensor = strategy.term(tp)
    key = (spec, frozenset(type(axis.term) for axis in strategy.axes), tensor is not None and tensor.batch)
    if key not in FACTS:
        FACTS[key] = facts_of(loaded(spec), layout_of(loaded(spec), strategy))
    return is_legal(strategy, facts=FACTS[key])


@cache
def drawn(spec: str, *, num: int, number: int) -> tuple[Strategy, ...]:
    """The first `num` distinct legal products of a fixed sequence of draws, the same in every run."""
    found: list[Strategy] = []
    seen: set[Strategy] = set()

    @seed(number)
    @settings(
        max_examples=40 * num,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(products())
    def draw(strategy: Strategy) -> None:
        if len(found) < num and strategy not in seen:
            seen.add(strategy)
            if is_legal_for(spec, strategy):
                found.append(strategy)

    draw()
    return tuple(found)
